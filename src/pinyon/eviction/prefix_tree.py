"""Held keys as runs of a prefix tree: what a policy goes by that looks at requests, not at single blocks.

A run is a stretch of keys that all requests so far have shared or not shared together. It is cut where a request leaves
it; so a run has one predecessor, and what extends it begins where it ends. Which key follows which is learned from the
calls: keys of one call are in the order of their prompt. What is not known stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic

from pinyon.eviction.policy import Key


class Run(Generic[Key]):
    """``keys`` in the order of the prompt, never empty while it is in the tree."""

    __slots__ = ("children", "first", "keys", "note", "parent")

    def __init__(self, keys: list[Key], first: int, parent: Run[Key] | None) -> None:
        self.keys = keys
        self.first = first
        """Place of the first key in its prompt, in blocks."""
        self.parent = parent
        self.children = 0
        """Runs that begin where this one ends."""
        self.note: Any = None
        """The policy's."""


class PrefixTree(Generic[Key]):
    """Costs O(keys of the call), but for cuts in the middle of long runs."""

    def __init__(self) -> None:
        self._run_of: dict[Key, Run[Key]] = {}

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, key: object) -> bool:
        return key in self._run_of

    def run_of(self, key: Key) -> Run[Key]:
        return self._run_of[key]

    def get(self, key: Key | None) -> Run[Key] | None:
        return None if key is None else self._run_of.get(key)

    def by_run(self, keys: Sequence[Key]) -> dict[Run[Key], list[Key]]:
        """These, which are held."""
        found: dict[Run[Key], list[Key]] = {}
        for key in keys:
            found.setdefault(self._run_of[key], []).append(key)
        return found

    def add(self, keys: Sequence[Key], first: int, parent: Run[Key] | None) -> Run[Key]:
        """A new run at the end of ``parent``."""
        run = Run(list(keys), first, parent)
        if parent is not None:
            parent.children += 1
        self._run_of.update(dict.fromkeys(keys, run))
        return run

    def extend(self, run: Run[Key], keys: Sequence[Key]) -> None:
        """It goes on with these; nothing begins at its end."""
        run.keys.extend(keys)
        self._run_of.update(dict.fromkeys(keys, run))

    def match(self, run: Run[Key], keys: Sequence[Key], at: int) -> tuple[int, int]:
        """Where ``keys[at:]`` leaves the run, as a place in the run, and how many of them are in it."""
        held = run.keys
        start = 0 if held[0] == keys[at] else held.index(keys[at])
        count = min(len(held) - start, len(keys) - at)
        if held[start : start + count] != list(keys[at : at + count]):
            count = next(number for number in range(count) if held[start + number] != keys[at + number])
        return start + count, count

    def cut(self, run: Run[Key], at: int) -> Run[Key]:
        """What is before ``at`` (above 0) becomes a run of its own, which is returned; the rest stays as it is."""
        head = Run(run.keys[:at], run.first, run.parent)
        head.children = 1
        del run.keys[:at]
        run.first += at
        run.parent = head
        self._run_of.update(dict.fromkeys(head.keys, head))
        return head

    def follow(self, run: Run[Key], parent: Run[Key]) -> None:
        """That ``run``, which stood alone, begins where ``parent`` ends, is known now."""
        before: Run[Key] | None = parent if run.children else None
        while before is not None:  # no circle, whatever we are told
            if before is run:
                return
            before = before.parent
        run.parent = parent
        parent.children += 1

    def remove(self, run: Run[Key], keys: Sequence[Key]) -> None:
        """These of it, wherever they are, are not held any more; it may be out of the tree now. O(its keys), but for
        what is at its end."""
        for key in keys:
            del self._run_of[key]
        held, gone = run.keys, set(keys)
        while held and held[-1] in gone:
            gone.remove(held.pop())
        if gone:
            held[:] = [key for key in held if key not in gone]
        self._emptied(run)

    def drop_end(self, run: Run[Key], count: int) -> list[Key]:
        """Its last keys, at least one, the last one first, are not held any more."""
        if count < 1:
            raise ValueError(f"{count} keys of a run cannot go")
        gone = run.keys[: -count - 1 : -1]
        del run.keys[-count:]
        for key in gone:
            del self._run_of[key]
        self._emptied(run)
        return gone

    @staticmethod
    def _emptied(run: Run[Key]) -> None:
        if not run.keys and run.parent is not None:
            run.parent.children -= 1

    def runs(self) -> Iterable[Run[Key]]:
        """All. O(keys): where nothing better is known."""
        return dict.fromkeys(self._run_of.values())
