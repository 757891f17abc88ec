"""The speeds of machines: numbers as data, each with where it comes from."""
