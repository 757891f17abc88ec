"""Clusters on a virtual clock: traces through the modules that production runs."""

import pinyon_lab.policies.names  # noqa: F401 - they choose among them
