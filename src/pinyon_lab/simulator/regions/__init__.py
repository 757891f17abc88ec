"""Several regions on one virtual clock: clients, load balancers and instances, and the network between them."""
