"""Which keys of which runs are pinned: in its run, such a key holds all before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from pinyon.eviction.policy import Key
from pinyon.eviction.prefix_tree import PrefixTree, Run
from pinyon.eviction.run_note import RunNote


class RunPins(Generic[Key]):
    """Keeps ``pins`` and ``fixed`` of runs' notes. Calls cost O(keys), and besides what is free at the ends of their
    runs."""

    def __init__(self, tree: PrefixTree[Key]) -> None:
        self._tree = tree
        self._keys: set[Key] = set()
        self._waiting: list[Run[Key]] = []
        """See :meth:`deepest`."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[Key]) -> Iterable[Run[Key]]:
        """None of them was pinned. Their runs."""
        self._keys.update(keys)
        found = self._tree.by_run(keys)
        for run, some in found.items():
            run.note.pins += len(some)
            self._fix(run, len(run.keys))
        return found

    def remove(self, keys: Sequence[Key]) -> Iterable[Run[Key]]:
        """All of them were. Their runs."""
        self._keys.difference_update(keys)
        found = self._tree.by_run(keys)
        for run, some in found.items():
            run.note.pins -= len(some)
            self._fix(run, run.note.fixed)
        return found

    def lost(self, run: Run[Key], keys: Sequence[Key]) -> None:
        """These, pinned or not, are not its any more."""
        run.note.pins -= sum(key in self._keys for key in keys)
        self._keys.difference_update(keys)
        self._fix(run, len(run.keys))

    def cut(self, run: Run[Key], head: Run[Key]) -> None:
        """What was the beginning of ``run`` is a run of its own."""
        head.note.pins = sum(key in self._keys for key in head.keys)
        run.note.pins -= head.note.pins
        self._fix(head, len(head.keys))
        self._fix(run, len(run.keys))

    def _fix(self, run: Run[Key], below: int) -> None:
        """From ``below`` on no key is pinned."""
        note: RunNote = run.note
        if not note.pins:
            below = 0
        while below and run.keys[below - 1] not in self._keys:
            below -= 1
        note.fixed = below

    def free_of(self, run: Run[Key]) -> list[Key]:
        """What is not pinned, the deepest first."""
        return [key for key in reversed(run.keys) if key not in self._keys]

    def deepest(self) -> Run[Key] | None:
        """The run that is deepest in its prompt, of those that are not pinned as a whole. Looked for among all, but
        then for many calls."""
        waiting = self._waiting
        for again in (False, True):
            while waiting and waiting[-1].note.pins == len(waiting[-1].keys):
                waiting.pop()
            if waiting or again or len(self._keys) == len(self._tree):
                break
            waiting.extend(sorted(self._tree.runs(), key=lambda run: run.first))
        return waiting[-1] if waiting else None
