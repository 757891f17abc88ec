"""Registered memory: of the host, of devices, and of those who exchange it."""
