"""The vocabulary every other room speaks: requests, block keys, KV layout, clock and the error tree."""
