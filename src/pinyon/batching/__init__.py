"""What enters the next engine step: batching policies, and how prompts are cut into chunks."""

from __future__ import annotations

from pinyon.batching.chunking import plan_chunks
from pinyon.batching.fcfs import Fcfs
from pinyon.batching.policy import BatchingPolicy, BatchRequest

__all__ = ["BatchRequest", "BatchingPolicy", "Fcfs", "plan_chunks"]
