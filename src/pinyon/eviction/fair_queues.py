"""The runs that may go, in the order in which they should, where tenants share the room."""

from __future__ import annotations

from typing import Generic

from pinyon.eviction.hazard_table import HazardTable
from pinyon.eviction.policy import Key
from pinyon.eviction.prefix_tree import Run
from pinyon.eviction.run_note import RunNote
from pinyon.eviction.run_queues import RunQueues
from pinyon.eviction.tenant_shares import TenantShares

MANY = 1 << 62
FADED = 64.0
"""A share protects for a time (:meth:`TenantShares.protects_s`), and what is older as long as its worth has not fallen
to one part in so many of what it was when it was used."""


class FairQueues(Generic[Key]):
    """``fair``: nothing goes of a tenant that has not more than its share while another has, unless it is old and all
    but worthless: shares are not for what nobody will use. Else worth alone decides."""

    def __init__(self, table: HazardTable, fair: bool) -> None:
        self._table = table
        self._queues: dict[int, RunQueues[Key]] = {}
        """By group of tenants."""
        self._now_s = 0.0
        self._shares = TenantShares() if fair else None
        self._nobody_above = False
        """Since :meth:`advance`: then shares decide nothing."""

    def whose(self, note: RunNote, tenant: str) -> None:
        """Of one that holds nothing yet."""
        note.tenant = tenant
        if self._shares is not None:
            note.group = self._shares.group(tenant)

    def hand(self, run: Run[Key], tenant: str, now_s: float) -> None:
        """It is that tenant's from now on."""
        self.leave(run)
        self.count(run, -len(run.keys))
        self.whose(run.note, tenant)
        self.count(run, len(run.keys))
        self.place(run, now_s)

    def count(self, run: Run[Key], more: int) -> None:
        """The tenant of this run has so many more keys."""
        shares = self._shares
        if shares is not None:
            note: RunNote = run.note
            shares.add(note.group, more)

    def again(self, note: RunNote, now_s: float) -> None:
        """Its tenant uses it, for the first time since its last use."""
        if self._shares is not None:
            self._shares.again(note.group, now_s - note.last_s)

    def most(self, run: Run[Key]) -> int:
        """Of its keys that may be taken now."""
        note: RunNote = run.note
        free = len(run.keys) - note.fixed
        return free if self._faded(note) else min(free, self.above(note.group))

    def _faded(self, note: RunNote) -> bool:
        if self._shares is not None and self._now_s - note.last_s < self._shares.protects_s(note.group):
            return False
        return FADED * self._table.value(note.of.number, note.bin) <= self._table.value(note.of.number, 0)

    def above(self, group: int) -> int:
        """How many keys may be taken from these tenants now."""
        return MANY if self._shares is None or self._nobody_above else self._shares.above(group)

    def place(self, run: Run[Key], now_s: float) -> None:
        """In line, if it is not there already; or out of it, if its end may not go: something extends it, or that is
        pinned."""
        note: RunNote = run.note
        if len(run.keys) == note.fixed or run.children:
            self.leave(run)
            return
        queues = self._queues.get(note.group)
        if queues is None:
            queues = self._queues[note.group] = RunQueues(self._table)
        queues.enter(run, now_s)

    def leave(self, run: Run[Key]) -> None:
        """It is not in line, wherever that is."""
        note: RunNote = run.note
        queues = self._queues.get(note.group)
        if queues is not None:
            queues.leave(note)

    def advance(self, now_s: float) -> None:
        """Before others are asked for."""
        for queues in self._queues.values():
            if queues.due_s <= now_s:
                queues.advance(now_s)
        self._now_s = now_s
        self._nobody_above = False

    def first(self) -> Run[Key] | None:
        """What is worth least of those that may go. Of a group that has not more than its share only its least is
        looked at, whether that has faded."""
        least = self._least()
        if least is None:
            self._nobody_above = True
            least = self._least()
        return least

    def _least(self) -> Run[Key] | None:
        least = None
        for queues in self._queues.values():
            found = queues.first()
            if found is not None and (least is None or found[0] < least[0]) and self.most(found[1]):
                least = found
        return None if least is None else least[1]

    def reorder(self) -> None:
        """Worths have changed."""
        for queues in self._queues.values():
            queues.reorder()
