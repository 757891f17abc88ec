"""KVCache Cache in the Wild: its figures."""
