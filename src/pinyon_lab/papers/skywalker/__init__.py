"""SkyWalker: its figures."""
