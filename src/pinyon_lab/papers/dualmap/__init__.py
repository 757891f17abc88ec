"""DualMap: its figures."""
