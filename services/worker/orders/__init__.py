"""What others ask of this worker and what becomes of it, as values and messages."""
