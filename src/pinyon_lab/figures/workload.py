"""The workloads that figures are made from, whose files do not come with pinyon, and the basis of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pinyon.eviction.interface import Traits
from pinyon_lab.caches.replay import CacheRequest
from pinyon_lab.traces import TraceRow


class Basis(StrEnum):
    """The basis of one of our numbers."""

    MEASURED = "measured"
    """Counted by the serving code in a replay of a recorded or published trace, or its CPU time on this machine."""
    MODELLED = "modelled"
    """Computed with a formula in place of a machine."""
    CONSTRUCTION = "by construction"
    """Found in a workload that was generated with the paper's statistics."""


class WorkloadSource(NamedTuple):
    """The source of a workload: its file's name without ``.jsonl`` or ``.jsonl.gz``, and its description."""

    stem: str
    text: str
    generated: bool = False
    """True if the workload was generated with its paper's statistics: these then hold by construction."""


SOURCES = {
    "conversation": WorkloadSource("mooncake_conversation", "Mooncake's conversation trace (FAST '25 release)"),
    "synthetic": WorkloadSource("mooncake_synthetic", "Mooncake's synthetic trace (FAST '25 release)"),
    "toolagent": WorkloadSource(
        "toolagent_generated", "made by `pinyon trace generate toolagent` in place of Mooncake's tool&agent trace", True
    ),
    "qwen_a_5d": WorkloadSource(
        "qwen_a_5d_generated", "made by `pinyon trace generate qwen-a --duration 5d --per-s 0.5`: five workdays", True
    ),
    "qwen-a": WorkloadSource(
        "qwen_a_generated", 'made by `pinyon trace generate qwen-a` in place of trace A of "in the wild"', True
    ),
    "qwen-b": WorkloadSource(
        "qwen_b_generated", 'made by `pinyon trace generate qwen-b` in place of trace B of "in the wild"', True
    ),
    "claude-code": WorkloadSource("claude_code_a", "sessions of Claude Code, derived from kv-cache-tester's traces"),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace by name; ``rows`` are in order of time."""

    name: str
    rows: Sequence[TraceRow]
    block_tokens: int
    generated: bool = False

    @property
    def basis(self) -> Basis:
        return Basis.CONSTRUCTION if self.generated else Basis.MEASURED

    @property
    def shown(self) -> str:
        """The name for a picture, with its basis where the workload was generated."""
        return f"{self.name} ({Basis.CONSTRUCTION})" if self.generated else self.name

    def asked(self) -> list[CacheRequest]:
        """Returns the requests as a cache sees them."""
        return [CacheRequest(row.blocks, row.time_s, Traits(row.category, row.user)) for row in self.rows]


def together(workloads: Sequence[Workload]) -> Workload:
    """Returns all workloads as one that starts them together, without shared blocks. Block sizes must be equal."""
    (block_tokens,) = {each.block_tokens for each in workloads}
    count, rows = len(workloads), list[TraceRow]()
    for number, each in enumerate(workloads):
        for row in each.rows:
            blocks = tuple(block * count + number for block in row.blocks)
            rows.append(row._replace(time_s=row.time_s - each.rows[0].time_s, blocks=blocks))
    rows.sort(key=lambda row: row.time_s)
    name = " + ".join(each.name for each in workloads)
    return Workload(name, rows, block_tokens, any(each.generated for each in workloads))
