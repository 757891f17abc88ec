"""The work that the scheduler's side of the connector gives to the workers' side in one engine step, and their answers.

vLLM pickles these between its processes, so they hold plain values only."""

from __future__ import annotations

import copyreg
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pinyon.core.block_keys import BlockKey
from pinyon.core.layout import KvLayout
from pinyon.core.orders import FetchSpan
from pinyon.core.request import UNKNOWN_CLASS, RequestClass


def _by_fields(value: Any) -> tuple[type, tuple[Any, ...]]:
    return type(value), tuple(getattr(value, each.name) for each in fields(value))


# Compiled, frozen ones cannot be unpickled otherwise.
copyreg.pickle(KvLayout, _by_fields)
copyreg.pickle(FetchSpan, _by_fields)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks ``[first, first + len(keys))`` of a prompt to be fetched into vLLM's blocks of the numbers ``blocks``.

    A job without keys fails at once."""

    job_id: int
    request_id: str
    first: int
    keys: list[BlockKey]
    blocks: list[int]
    spans: tuple[FetchSpan, ...]
    """The sources, from the first block on; empty: the worker looks up its own part."""
    request_class: RequestClass = UNKNOWN_CLASS
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Complete blocks to be put into the store. They are pinned until every rank has said that the job is done."""

    job_id: int
    places: list[int]
    """The place of each block in its prompt."""
    keys: list[BlockKey]
    blocks: list[int]
    request_class: RequestClass = UNKNOWN_CLASS


@dataclass(slots=True)
class StepJobs(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The work of one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    """Blocks that may get new content from this step on."""
    complete: list[tuple[BlockKey, int]] = field(default_factory=list)
    """Blocks that this step completes, and their keys."""
    forget: bool = False
    """All content is void, such as after new weights."""
    step: int = 0
    """The number of the step; 0: it computes nothing."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load: blocks by source, and the time that it took."""

    job_id: int
    peer_blocks: int
    store_blocks: int
    seconds: float
    spans: tuple[tuple[str, int, float], ...] = ()
    """Source, bytes and seconds of each span that arrived whole."""


@dataclass(slots=True)
class StepNews(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """News of one rank, or of all ranks together."""

    saved: dict[int, int] = field(default_factory=dict)
    """The number of ranks that are done with each save job."""
    loaded: list[Loaded] = field(default_factory=list)
    failed_sources: frozenset[str] = frozenset()
    step: int = 0
    """The step that has ended, if it computed something."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepNews)
        saved = dict(self.saved)
        for job_id, ranks in other.saved.items():
            saved[job_id] = saved.get(job_id, 0) + ranks
        return StepNews(saved, self.loaded + other.loaded, self.failed_sources | other.failed_sources, self.step)


@dataclass(frozen=True, slots=True)
class RankFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The facts about a rank's memory, and the address at which peers read it."""

    layout: KvLayout
    address: str
    boot_id: str
