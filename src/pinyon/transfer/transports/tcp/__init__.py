"""The tcp transport: framed TCP streams."""
