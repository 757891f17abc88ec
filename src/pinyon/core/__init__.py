"""The vocabulary of all other rooms: requests, block keys, KV layout, clock and the error tree."""
