"""The speeds of machines: numbers as data, each with its origin."""
