"""What the papers' figures are made of: claims and rows, workloads, servers and test beds, pictures."""

import pinyon_lab.policies.names  # noqa: F401 - they choose among them
