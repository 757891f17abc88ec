"""What a federation of regions is, and who serves the instances of a load balancer that failed (SkyWalker §4.2)."""
