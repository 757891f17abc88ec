"""Caches that a trace is played through, on their own."""
