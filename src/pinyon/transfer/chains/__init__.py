"""From requests to chains: what one path moves at a time, and how it ends."""
