"""Load balancers of other regions: what is forwarded to them, and what they forward to us."""
