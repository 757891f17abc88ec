"""Other regions: their load balancers as targets, and their requests as ours."""
