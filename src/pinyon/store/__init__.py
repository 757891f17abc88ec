"""The KV store: object layout, allocator, metadata and client."""
