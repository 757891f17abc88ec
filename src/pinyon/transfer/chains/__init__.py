"""Chains: what one path moves at a time, how requests become chains, and how these end."""
