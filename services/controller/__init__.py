"""The regional controller: which regions and load balancers there are, and who stands in for one that failed."""
