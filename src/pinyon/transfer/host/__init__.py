"""What the host has: its name, its NICs, its topology, and what the kernel says of them."""
