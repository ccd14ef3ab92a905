"""Watching runs while they are running, in processes of their own that cost the ranks nothing."""
