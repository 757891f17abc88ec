"""The parts of the papers' figures: claims and rows, workloads, servers and test beds, pictures."""

import pinyon_lab.policies.names  # noqa: F401 - they choose among them
