"""The path of a request from its head to its answer: callers, tenants, the queue and the targets of requests."""
