"""The requests of other services to this worker and their outcomes, as values and messages."""
