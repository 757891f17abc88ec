"""The KV store: object layout, allocator, client."""
