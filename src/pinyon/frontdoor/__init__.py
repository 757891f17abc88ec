"""The way of a request from its head to its answer: callers, tenants, the queue and what requests are sent to."""
