"""The host: its name, its NICs, its topology, and what the kernel says of them."""
