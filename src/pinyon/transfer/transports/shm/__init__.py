"""Between processes of one host."""
