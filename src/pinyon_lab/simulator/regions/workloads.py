"""The workloads of SkyWalker's evaluation (§5.1; §3.2 for Fig. 6), by name: what the clients of a region send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from pinyon.core.errors import InvalidArgument
from pinyon_lab.simulator.regions.chats import ARENA, WILDCHAT, Chats, ChatSettings, ChatSource, Together
from pinyon_lab.simulator.regions.programs import Source
from pinyon_lab.simulator.regions.settings import BLOCK_TOKENS
from pinyon_lab.simulator.regions.trees import Trees, TreeSettings, TreeSource

_COMMON: Final = replace(WILDCHAT, own=0.0, worldwide=0.0, prompt_sigma=1.0, again=0.0, long_share=0.0)
_CHATS: Final[Mapping[str, tuple[ChatSettings, int, int]]] = {
    "arena": (ARENA, 1, 1),
    "wildchat": (WILDCHAT, 1, 1),
    "cross-user": (replace(_COMMON, regional=0.8, openings=150), 1, 1),
    "bursty": (replace(_COMMON, own=0.8, regional=0.0, users=60), 1, 4),
    "heterogeneous": (replace(_COMMON, regional=0.8, openings=150, users=60), 4, 4),
}
"""With how many conversations a program has, at least and at most."""
_BRANCHES: Final = {"tree": 2, "mixed-tree": 2}
BUSY_BRANCHES: Final = 4
"""Of the first region's trees, in the mixed workload."""
WORKLOADS: Final[Mapping[str, str]] = {
    "arena": "conversations as in ChatBot Arena",
    "wildchat": "conversations as in WildChat",
    "tree": "trees of thoughts, two branches: 15 requests each",
    "mixed-tree": "the same, but in the first region four branches: 85 requests",
    "cross-user": "conversations with one of 150 openings that all users have in common",
    "bursty": "one to four conversations of one user at once, mostly with that user's own opening",
    "heterogeneous": "four conversations of one user at once, with openings that all users have in common",
}


def sources(workload: str, regions: Sequence[str], rng: Random) -> dict[str, Source]:
    """By region. Raises :class:`InvalidArgument` for one that is not known."""
    if workload in _BRANCHES:
        settings = TreeSettings(_BRANCHES[workload])
        busy = replace(settings, branches=BUSY_BRANCHES) if workload == "mixed-tree" else settings
        trees = Trees(BLOCK_TOKENS, settings.system_tokens, rng)
        return {region: TreeSource(trees, settings if place else busy, region) for place, region in enumerate(regions)}
    if workload not in _CHATS:
        raise InvalidArgument(f"no workload {workload!r}; there are: {', '.join(WORKLOADS)}", field="workload")
    chat, least, most = _CHATS[workload]
    chats = Chats(chat, BLOCK_TOKENS, rng)
    single = {region: ChatSource(chats, region, rng) for region in regions}
    return {region: Together(source, least, most) for region, source in single.items()} if most > 1 else {**single}
