"""What traces say, and traces that are made."""
