"""Registered memory, of the host and of devices, and the grants that open it to peers."""
