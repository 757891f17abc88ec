"""Several load balancers on one host that listen at one address: their parent, who starts and ends them."""
