"""Workloads made by a seed: sources of requests, and profiles with the statistics that papers print."""

from pinyon.traces.generate.generator import generate
from pinyon.traces.generate.profiles import PROFILES, profile

__all__ = ["PROFILES", "generate", "profile"]
