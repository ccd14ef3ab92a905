"""Watching runs while they go on: readers in processes of their own, which cost ranks nothing."""
