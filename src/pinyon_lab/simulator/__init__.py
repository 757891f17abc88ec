"""Clusters on a virtual clock: traces through the modules that production runs."""
