"""The held keys as runs of a prefix tree, for a policy that looks at requests, not at single blocks.

A run is a stretch of keys that each request so far has used as a whole or not at all. It is cut where a request leaves
it, so that a run has one predecessor, and the runs that extend it begin where it ends. The tree learns from the calls
which key follows which: keys of one call are in the order of their prompt. A run of unknown predecessor stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

from pinyon.eviction.hazard_table import HazardClass, Sample
from pinyon.eviction.interface import Key


class TreeRun(Generic[Key]):
    """A run, and what pinyon's own policy notes of it.

    Its ``keys`` are in the order of the prompt, and never empty while the run is in the tree."""

    __slots__ = (
        *("bin", "branches", "children", "first", "fixed", "gap_s", "group", "growing", "keys", "kind", "last_s", "of"),
        *("parent", "pending", "pins", "sample", "stamp", "tenant", "turn"),
    )

    def __init__(
        self, keys: list[Key], first: int, parent: TreeRun[Key] | None, last_s: float, of: HazardClass
    ) -> None:
        """Makes a run that was stored or used at ``last_s``, of a class that may change."""
        self.keys = keys
        self.first = first
        """The place of the first key in its prompt, in blocks."""
        self.parent = parent
        self.children = 0
        """The number of runs that begin where this one ends."""
        self.last_s = last_s
        self.of = of
        self.bin = 0
        self.stamp = 0
        """A counter that rises when the run enters or leaves a queue; odd while it is in one."""
        self.pins = 0
        """The number of pinned keys."""
        self.fixed = 0
        """The number of first keys that may not go: those up to the last pinned one."""
        self.sample: Sample | None = None
        self.kind = ""
        self.turn = 0
        self.tenant = ""
        self.group = 0
        """The group of tenants."""
        self.gap_s = 0.0
        """The time between the last two uses; for a shared run a mean of such times."""
        self.branches = 0
        """The number of requests that went on differently at the run's end."""
        self.pending = False
        """True after a use by a request of which nothing else is known yet."""
        self.growing = False
        """True from when the run is stored until it is used."""


class PrefixTree(Generic[Key]):
    """A prefix tree whose calls cost O(keys of the call), but for cuts in the middle of long runs."""

    def __init__(self) -> None:
        self._run_of: dict[Key, TreeRun[Key]] = {}

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, key: object) -> bool:
        return key in self._run_of

    def run_of(self, key: Key) -> TreeRun[Key]:
        return self._run_of[key]

    def get(self, key: Key | None) -> TreeRun[Key] | None:
        return None if key is None else self._run_of.get(key)

    def by_run(self, keys: Sequence[Key]) -> dict[TreeRun[Key], list[Key]]:
        """Returns held keys, grouped by run."""
        found: dict[TreeRun[Key], list[Key]] = {}
        for key in keys:
            found.setdefault(self._run_of[key], []).append(key)
        return found

    def add(
        self, keys: Sequence[Key], first: int, parent: TreeRun[Key] | None, now_s: float, of: HazardClass
    ) -> TreeRun[Key]:
        """Adds a run at the end of ``parent`` and returns it; ``first`` is its first key's place in the prompt."""
        run = TreeRun(list(keys), first, parent, now_s, of)
        if parent is not None:
            parent.children += 1
        self._run_of.update(dict.fromkeys(keys, run))
        return run

    def extend(self, run: TreeRun[Key], keys: Sequence[Key]) -> None:
        """Appends keys to a run, which must have no children."""
        run.keys.extend(keys)
        self._run_of.update(dict.fromkeys(keys, run))

    def match(self, run: TreeRun[Key], keys: Sequence[Key], at: int) -> tuple[int, int]:
        """Returns the place in the run where ``keys[at:]`` leave it, and how many of them are in it."""
        held = run.keys
        start = 0 if held[0] == keys[at] else held.index(keys[at])
        count = min(len(held) - start, len(keys) - at)
        if held[start : start + count] != list(keys[at : at + count]):
            count = next(number for number in range(count) if held[start + number] != keys[at + number])
        return start + count, count

    def cut(self, run: TreeRun[Key], at: int, now_s: float) -> TreeRun[Key]:
        """Makes the keys before ``at`` (above 0) a run of its own and returns that; ``run`` keeps the rest."""
        head = TreeRun(run.keys[:at], run.first, run.parent, now_s, run.of)
        head.children = 1
        del run.keys[:at]
        run.first += at
        run.parent = head
        self._run_of.update(dict.fromkeys(head.keys, head))
        return head

    def follow(self, run: TreeRun[Key], parent: TreeRun[Key]) -> None:
        """Notes that ``run``, which stood alone, begins where ``parent`` ends; ignored if that would make a circle."""
        before: TreeRun[Key] | None = parent if run.children else None
        while before is not None:  # no circle, even if a caller is wrong
            if before is run:
                return
            before = before.parent
        run.parent = parent
        parent.children += 1

    def remove(self, run: TreeRun[Key], keys: Sequence[Key]) -> None:
        """Removes keys from any place of a run, which is out of the tree once it is empty.

        Costs O(keys of the run), unless the keys are at its end."""
        for key in keys:
            del self._run_of[key]
        held, gone = run.keys, set(keys)
        while held and held[-1] in gone:
            gone.remove(held.pop())
        if gone:
            held[:] = [key for key in held if key not in gone]
        self._emptied(run)

    def drop_end(self, run: TreeRun[Key], count: int) -> list[Key]:
        """Removes the last ``count`` keys of a run, at least one, and returns them, the last one first."""
        if count < 1:
            raise ValueError(f"{count} keys of a run cannot go")
        gone = run.keys[: -count - 1 : -1]
        del run.keys[-count:]
        for key in gone:
            del self._run_of[key]
        self._emptied(run)
        return gone

    @staticmethod
    def _emptied(run: TreeRun[Key]) -> None:
        if not run.keys and run.parent is not None:
            run.parent.children -= 1

    def runs(self) -> Iterable[TreeRun[Key]]:
        """Returns all runs, in O(all held keys): for use where there is no faster way."""
        return dict.fromkeys(self._run_of.values())


class RunPins(Generic[Key]):
    """The pinned keys, and ``pins`` and ``fixed`` of the runs: a pinned key also holds all keys before it in its run.

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
