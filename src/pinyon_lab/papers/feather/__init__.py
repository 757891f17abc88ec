"""FEATHER: its figures."""
