"""The KV pool: what is held, lent, fetched, pushed and stored."""
