"""The rdma transport: one-sided RDMA by pyverbs."""
