"""Authenticated connections to other processes: dialled, accepted, pooled."""
