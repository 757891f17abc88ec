"""Policies to compare with: baselines of papers, oracles, and pinyon's own ones less a part of theirs.

Where the laboratory is imported, they are offered by name (:mod:`pinyon_lab.policies.names`). A running service loads
them as it loads any other policy: ``--batching pinyon_lab.policies.batching:Oracle``."""
