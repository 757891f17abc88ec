"""Framed TCP streams."""
