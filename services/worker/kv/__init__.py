"""The KV pool: blocks held, lent, fetched, pushed and stored."""
