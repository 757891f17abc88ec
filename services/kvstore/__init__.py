"""A store node process: pool memory, tiers, leases, metadata in Redis."""
