"""Who is on the host of a source, so that what it fetches from there goes over no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pinyon.core.request import Role
from pinyon.placement.instances import InstanceState


class Neighbours:
    """Of some members of a fleet, by host; made once for as long as they are the same."""

    __slots__ = ("_by_bit", "mask", "on_ssd", "stores")

    def __init__(self, members: Iterable[InstanceState] = ()) -> None:
        by_host: dict[str, list[InstanceState]] = {}
        """Those that compute prompts."""
        sources: list[InstanceState] = []
        self.stores = self.on_ssd = self.mask = 0
        """Bits of store nodes, of who has its blocks on SSDs, and of who has a neighbour and has them in memory."""
        for state in members:
            if state.info.role is Role.STORE:
                self.stores |= state.bit
            if state.info.on_ssd:
                self.on_ssd |= state.bit
            elif state.host:
                sources.append(state)
            if state.host and state.info.role.prefills:
                by_host.setdefault(state.host, []).append(state)
        self._by_bit: dict[int, list[InstanceState]] = {}
        for state in sources:
            here = by_host.get(state.host, [])
            if here and here != [state]:
                self.mask |= state.bit
                self._by_bit[state.bit] = here

    def of(self, bit: int) -> Sequence[InstanceState]:
        """Those on the host of the source with this bit, which is in :attr:`mask`; itself too, if it computes
        prompts."""
        return self._by_bit[bit]
