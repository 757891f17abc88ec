"""One-sided RDMA by pyverbs."""
