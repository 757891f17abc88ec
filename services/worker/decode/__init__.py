"""The requests that this instance owns."""
