"""What a run came to, on one page: for people who read it afterwards."""
