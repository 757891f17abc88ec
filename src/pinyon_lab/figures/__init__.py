"""What the papers' figures are made of: claims and rows, workloads, servers and test beds, pictures."""
