"""Instances of pinyon as targets of requests."""
