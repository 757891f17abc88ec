"""How fast machines are: numbers as data, each with where it comes from."""
