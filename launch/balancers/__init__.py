"""Several load balancers of one host behind one port: ``python -m services.lb --processes N``."""
