"""The regional controller: the regions and load balancers there are, and which of these stands in for a failed one."""
