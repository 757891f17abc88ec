"""Federations of regions, and the load balancers that stand in for one that failed (SkyWalker §4.2)."""
