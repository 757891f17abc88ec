"""Caches and pools of caches that a trace is played through, on their own."""

import pinyon_lab.policies.names  # noqa: F401 - they choose among them
