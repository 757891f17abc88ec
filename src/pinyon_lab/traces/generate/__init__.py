"""Workloads generated from a seed: sources of requests, and profiles with the statistics that papers print."""

from pinyon_lab.traces.generate.generator import generate
from pinyon_lab.traces.generate.profile import DAY_S
from pinyon_lab.traces.generate.profiles import PROFILES, profile

__all__ = ["DAY_S", "PROFILES", "generate", "profile"]
