"""The classes of requests: by kind and turn, pace of the conversation, the tenant so far, and length of the prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import Any

from pinyon.eviction.hazard_table import HazardClass, HazardTable
from pinyon.eviction.prefix_tree import TreeRun

TENANTS_MAX = 65_536
ANY, OTHER, SHARED, LEFT = "(any)", "(other)", "(shared)", "(left)"
"""Classes of no kind named by a client, of kinds beyond the limit, of shared runs, and of runs left by the next turn.

No kind can have these names (:mod:`pinyon.core.request`)."""
TURNS = (1, 2, 3, 4, 5, 7, 10, 15, 23)
"""The bounds of the ranges of turns; a turn belongs to the next bound that is not below it."""
MORE_TURNS = "more"
"""The name of all turns beyond the last bound."""
GAPS_S = (4.0, 16.0, 64.0, 256.0, 1024.0)
"""The bounds of the ranges of gaps, as those of turns."""
TENANT_PRIOR = 3.0
TENANT_LEVELS = 8
RECENT = 64.0
"""The number of requests of a tenant after which the counts are halved."""


class _Tenant:
    """Counts of how often a tenant's conversations went on, after the first turn and after later turns."""

    __slots__ = ("again", "began")

    def __init__(self) -> None:
        self.began = [0.0, 0.0]
        self.again = [0.0, 0.0]


class RequestClasses:
    """The classifier of runs, which also tells the table what became of them."""

    def __init__(self, table: HazardTable) -> None:
        self._table = table
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._all = _Tenant()
        self._any, self._other = table.keep(ANY), table.keep(OTHER)
        self._shared, self._left = table.keep(SHARED), table.keep(LEFT)

    def tip(self, run: TreeRun[Any], blocks: int, now_s: float) -> None:
        """Gives a class to a run at whose end a request's prompt ends, ``blocks`` long, and begins its sample."""
        later = run.turn > 1
        tenant = self._tenant(run.tenant)
        for each in (tenant, self._all):
            each.began[later] += 1.0
            if each.began[later] > RECENT:
                each.began[later] /= 2
                each.again[later] /= 2
        usual = (self._all.again[later] + 1.0) / (self._all.began[later] + 2.0)
        rate = (tenant.again[later] + TENANT_PRIOR * usual) / (tenant.began[later] - 1.0 + TENANT_PRIOR)
        table = self._table
        kind = self._kind(run.kind)
        stage = table.of((kind.name, later), kind)
        turns = next((str(turn) for turn in TURNS if run.turn <= turn), MORE_TURNS)
        of = table.of(f"{kind.name}/{turns}", stage)
        if later:
            of = table.of((of.name, "gap", bisect_left(GAPS_S, run.gap_s)), of)
        if run.tenant:
            of = table.of((of.name, "tenant", min(TENANT_LEVELS - 1, int(rate * TENANT_LEVELS))), of)
        run.of = table.of((of.name, "blocks", blocks.bit_length()), of)
        run.sample = table.begin(run.of, now_s)

    def shared(self, run: TreeRun[Any], now_s: float) -> None:
        """Gives a class to a run after which requests went on differently; from now on its own uses count."""
        self.forget(run)
        table = self._table
        pace = bisect_left(GAPS_S, run.gap_s)
        paced = table.of((SHARED, pace), self._shared)
        run.of = table.of((SHARED, pace, min(4, run.branches.bit_length())), paced)
        run.sample = table.begin(run.of, now_s)

    def left(self, run: TreeRun[Any], now_s: float) -> None:
        """Gives a class to a run that the next turn did not use, though it used the run before."""
        self.again(run, now_s)
        run.of = self._left
        run.sample = self._table.begin(run.of, run.last_s)
        run.turn = 0

    def again(self, run: TreeRun[Any], now_s: float) -> None:
        """Counts a reuse, for the run's sample and for the tenant."""
        if run.sample is None or run.sample.over:
            return
        self._table.again(run.sample, now_s)
        if run.turn:
            for each in (self._tenant(run.tenant), self._all):
                each.again[run.turn > 1] += 1.0

    def forget(self, run: TreeRun[Any]) -> None:
        """Ends the run's sample, as its fate tells nothing any more."""
        if run.sample is not None:
            self._table.give_up(run.sample)
            run.sample = None

    def _kind(self, name: str) -> HazardClass:
        if not name:
            return self._any
        root = self._table.root
        found = self._table.of(name, root)
        return self._other if found is root else found

    def _tenant(self, name: str) -> _Tenant:
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = _Tenant()
            if len(self._tenants) > TENANTS_MAX:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(name)
        return found
