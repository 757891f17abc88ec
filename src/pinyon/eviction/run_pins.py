"""The pinned keys of each run; a pinned key also holds all keys before it in its run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from pinyon.eviction.interface import Key
from pinyon.eviction.prefix_tree import PrefixTree, TreeRun


class RunPins(Generic[Key]):
    """The pinned keys, and ``pins`` and ``fixed`` of the runs.

    Calls cost O(keys), and in addition the number of free keys at the ends of their runs."""

    def __init__(self, tree: PrefixTree[Key]) -> None:
        self._tree = tree
        self._keys: set[Key] = set()
        self._waiting: list[TreeRun[Key]] = []
        """The candidates of :meth:`deepest`, the deepest last."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[Key]) -> Iterable[TreeRun[Key]]:
        """Pins keys, none of which was pinned, and returns their runs."""
        self._keys.update(keys)
        found = self._tree.by_run(keys)
        for run, some in found.items():
            run.pins += len(some)
            self._fix(run, len(run.keys))
        return found

    def remove(self, keys: Sequence[Key]) -> Iterable[TreeRun[Key]]:
        """Releases keys, all of which were pinned, and returns their runs."""
        self._keys.difference_update(keys)
        found = self._tree.by_run(keys)
        for run, some in found.items():
            run.pins -= len(some)
            self._fix(run, run.fixed)
        return found

    def lost(self, run: TreeRun[Key], keys: Sequence[Key]) -> None:
        """Forgets keys, pinned or not, that the run has lost."""
        run.pins -= sum(key in self._keys for key in keys)
        self._keys.difference_update(keys)
        self._fix(run, len(run.keys))

    def cut(self, run: TreeRun[Key], head: TreeRun[Key]) -> None:
        """Divides the pins, as the beginning of ``run`` has become the run ``head``."""
        head.pins = sum(key in self._keys for key in head.keys)
        run.pins -= head.pins
        self._fix(head, len(head.keys))
        self._fix(run, len(run.keys))

    def _fix(self, run: TreeRun[Key], below: int) -> None:
        """Updates ``fixed`` of a run in which no key from place ``below`` on is pinned."""
        if not run.pins:
            below = 0
        while below and run.keys[below - 1] not in self._keys:
            below -= 1
        run.fixed = below

    def free_of(self, run: TreeRun[Key]) -> list[Key]:
        """Returns the run's keys that are not pinned, the deepest first."""
        return [key for key in reversed(run.keys) if key not in self._keys]

    def deepest(self) -> TreeRun[Key] | None:
        """Returns the run deepest in its prompt among those that are not wholly pinned, or None.

        All runs are sorted for that, but once for many calls."""
        waiting = self._waiting
        for again in (False, True):
            while waiting and waiting[-1].pins == len(waiting[-1].keys):
                waiting.pop()
            if waiting or again or len(self._keys) == len(self._tree):
                break
            waiting.extend(sorted(self._tree.runs(), key=lambda run: run.first))
        return waiting[-1] if waiting else None
