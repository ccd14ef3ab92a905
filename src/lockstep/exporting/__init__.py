"""Trained models for programs without Lockstep."""
