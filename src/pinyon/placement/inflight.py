"""Placements in flight: the load that they add to instances until a report takes it back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import TypeVar

from pinyon.core.block_keys import KEY_BYTES
from pinyon.core.errors import ResourceExhausted
from pinyon.placement.expected import ExpectedBlocks
from pinyon.placement.fetch_time import path_kind
from pinyon.placement.instances import InstanceState
from pinyon.placement.load_table import whole_us
from pinyon.placement.policy import PlacementDecision, PlacementRequest, WaitingPrompt
from pinyon.placement.shared_prefixes import Mark
from pinyon.placement.transfer_cost import NETWORK, SSD

EXPECTED_KEYS_MAX = 1_000_000
"""The limit of expected keys over all instances, 16 to 32 MB. Placements beyond it look as if they shared nothing."""

Part = TypeVar("Part")


class _Placement:
    """A placement. Its prefill part counts until ``prefilled``; ``begun``: the prompt is being computed. From then on
    the predicted ``prefill_us`` and ``transfer_us`` are 0, and ``fetches`` are empty. ``first_s``: when the request was
    placed first, if it was elsewhere before."""

    __slots__ = (
        *("begun", "blocks", "claimed", "decision", "decode", "expected", "fetches", "first_s", "marks"),
        *("placed_s", "prefill", "prefill_us", "prefilled", "request", "transfer_us"),
    )

    # written out: what ``dataclass`` makes is never compiled, and every request makes one
    def __init__(
        self,
        decision: PlacementDecision,
        expected: bytes,
        blocks: int,
        placed_s: float,
        first_s: float,
        request: PlacementRequest | None,
    ) -> None:
        self.prefill, self.decode, self.fetches = decision.prefill, decision.decode, decision.fetches
        self.prefill_us: int = whole_us(decision.prefill_s)
        self.transfer_us: int = whole_us(decision.transfer_s)
        self.expected, self.blocks, self.placed_s, self.first_s = expected, blocks, placed_s, first_s
        self.request, self.begun, self.prefilled, self.claimed = request, False, False, False
        self.marks: Sequence[Mark] = ()
        # a policy's findings are large: a decision is kept only where it is asked for
        self.decision = decision if request is not None or decision.trial is not None else None


class InFlightTable:
    """The prefill and the decode part of every placement, until each ends, is released, or gets too old.

    A placement is forgotten if its decode instance did not report its begin within ``unclaimed_s`` seconds: the load
    balancer died before it used the placement, or the instance refused it. So is a placement that is not claimed again
    after the instance's session broke: the report of its end may have been lost with that. Age is the last resort: a
    part counts for at most ``prefill_s`` or ``decode_s`` seconds. At most ``limit`` placements are kept.

    The decode instance owns the request: with the decode part the prefill part goes, as its end may never be reported.
    The reverse is not so: a request whose prompt is computed is still to be decoded.

    Only computing waits for the engine: fetches go on beside it. While the prefill part counts, its instance is
    expected to hold the prompt's blocks soon."""

    def __init__(
        self,
        limit: int,
        unclaimed_s: float,
        prefill_s: float,
        decode_s: float,
        expected_keys_max: int = EXPECTED_KEYS_MAX,
    ) -> None:
        self._expected_keys_max = expected_keys_max
        self._limit = limit
        self._unclaimed_s = unclaimed_s
        self._prefill_s = prefill_s
        self._decode_s = decode_s
        self._placements: dict[str, _Placement] = {}
        """The placements by age: the oldest are in front."""
        self._prefills: dict[str, _Placement] = {}
        """The placements whose prefill part counts, by age too."""
        self._unclaimed: dict[str, float] = {}
        """Placements that have not begun as far as their decode instance's session has said, and since when."""
        self._by_instance: dict[InstanceState, dict[str, None]] = {}
        """Requests by the instances where they have a part: many instances may go at once, and each needs its own."""
        self._expected_keys = 0
        self.expected = ExpectedBlocks()
        self.expired = 0
        self.heard: Callable[[PlacementDecision, float], None] | None = None
        """A callback for each trial whose prompt was computed where it was placed, with the seconds since placement."""

    @property
    def prefills(self) -> int:
        return len(self._prefills)

    @property
    def decodes(self) -> int:
        return len(self._placements)

    def holds(self, state: InstanceState) -> bool:
        """Returns whether a part of some placement counts at the instance."""
        return state in self._by_instance

    def check_room(self, now_s: float) -> None:
        """Raises :class:`ResourceExhausted` if no placement can be added."""
        if len(self._placements) >= self._limit:
            self.expire(now_s)
            if len(self._placements) >= self._limit:
                raise ResourceExhausted(f"{self._limit} placements are in flight", retry_after_s=1.0)

    def shares_no_more(self, request_id: str) -> None:
        """Forgets the prefixes of a request that is placed again: it must not share anything with itself."""
        part = self._placements.get(request_id)
        if part is not None and part.marks:
            part.decode.loads.prefixes.ended(part.decode.row, part.marks)
            part.marks = ()

    def add(
        self,
        request_id: str,
        decision: PlacementDecision,
        decode_blocks: int,
        now_s: float,
        expected: bytes = b"",
        request: PlacementRequest | None = None,
        first_s: float | None = None,
        decoded_keys: bytes = b"",
    ) -> None:
        """Counts a placement. One with the same id that is still counted is replaced: the request was placed again.

        ``expected``: packed keys of the blocks that the prefill instance does not hold yet, and that others may reuse
        later. ``request``: for :meth:`waiting`; ``first_s``: when it was placed first, if it was elsewhere before.
        ``decoded_keys``: packed keys of the blocks that others may share while it is decoded; ``decode_blocks`` are
        without those that it shares there itself."""
        self.release(request_id)
        if self._expected_keys + len(expected) // KEY_BYTES > self._expected_keys_max:
            expected = b""
        part = _Placement(decision, expected, decode_blocks, now_s, now_s if first_s is None else first_s, request)
        self._placements[request_id] = part
        if decision.prefill is decision.decode or not decision.decode.info.server_url:
            self._unclaimed[request_id] = now_s  # else the decode server hears of it when its prompt is computed
        self._prefills[request_id] = part
        prefill, decode = part.prefill, part.decode
        self._remember(request_id, prefill)
        if decode is not prefill:
            self._remember(request_id, decode)
        if expected:
            self._expected_keys += len(expected) // KEY_BYTES
            self.expected.add(prefill, expected)
        prefill.loads.count(prefill.row, part.prefill_us)
        prefill.inflight_transfer_us += part.transfer_us
        self._count_reads(part, 1)
        if decoded_keys:
            part.marks = decode.loads.prefixes.placed(decode.row, decoded_keys)
        decode.decodes_changed(1, decode_blocks)

    def waiting(self, state: InstanceState) -> list[WaitingPrompt]:
        """Returns the requests that were placed there and are not being computed yet, in order of arrival; only those
        that were added with their request."""
        parts = [self._placements[request_id] for request_id in self._by_instance.get(state, ())]
        return [
            WaitingPrompt(part.request, part.decision, part.first_s)
            for part in parts
            if part.prefill is state and not part.begun and not part.prefilled
            if part.request is not None and part.decision is not None
        ]

    def begin_decode(self, request_id: str, state: InstanceState) -> None:
        """Notes that ``state`` reported the request's arrival. Ignored if it is not, or no longer, placed there."""
        part = self._placements.get(request_id)
        if part is not None and part.decode is state:
            part.claimed = True
            self._unclaimed.pop(request_id, None)

    # for reports, which name many requests: each does the same as the method for one

    def begin_decodes(self, state: InstanceState, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.begin_decode(request_id, state)

    def begin_prefills(
        self, state: InstanceState, now_s: float, over: Collection[str], request_ids: Sequence[str]
    ) -> None:
        """Notes that these prompts are being computed; those in ``over`` have ended already."""
        for request_id in request_ids:
            self.begin_prefill(request_id, state, now_s, 0.0 if request_id in over else None)

    def end_prefills(self, state: InstanceState, now_s: float, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.end_prefill(request_id, state, now_s)

    def end_decodes(self, state: InstanceState, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.end_decode(request_id, state)

    def unclaim(self, state: InstanceState, now_s: float) -> None:
        """Marks all requests at ``state`` as unclaimed: its new session names those that are there."""
        for request_id in self._by_instance.get(state, ()):
            if self._placements[request_id].decode is state:
                self._unclaimed.setdefault(request_id, now_s)

    def begin_prefill(self, request_id: str, state: InstanceState, now_s: float, seconds: float | None = None) -> None:
        """Notes that ``state`` computes the request's prompt, which takes ``seconds``, or as predicted. Ignored if it
        is not, or no longer, placed there."""
        part = self._placements.get(request_id)
        if part is None or part.begun or part.prefilled:
            return
        if part.prefill is not state:
            if part.decode is state:  # it could not be computed there
                self._prefill_over(request_id, part, now_s)
            return
        part.begun = True
        state.computing += 1
        loads, row = state.loads, state.row
        loads.count(row, part.prefill_us, -1)
        loads.ends_s[row] = max(now_s, loads.ends_s[row]) + (part.prefill_us * 1e-6 if seconds is None else seconds)
        part.prefill_us = 0
        self._reads_over(part)

    def end_prefill(self, request_id: str, state: InstanceState, now_s: float) -> None:
        """Notes that ``state`` reported the end. Ignored if the request is not, or no longer, placed there.

        A prefill that ends without having begun was cancelled or failed: it tells nothing of how fast the instance is.
        """
        part = self._placements.get(request_id)
        if part is not None and part.prefill is state and not part.prefilled:
            decision = part.decision
            self._prefill_over(request_id, part, now_s)
            if not part.begun:
                return
            state.prefill_ended_s = now_s
            if self.heard is not None and decision is not None and decision.trial is not None:
                self.heard(decision, now_s - part.placed_s)

    def end_decode(self, request_id: str, state: InstanceState) -> None:
        """Notes that ``state`` reported the end of the decode, which ends the request: the decode instance owns it."""
        part = self._placements.get(request_id)
        if part is not None and part.decode is state:
            self.release(request_id)

    def release(self, request_id: str) -> bool:
        """Forgets a placement. Returns whether any part of it was still counted."""
        part = self._placements.get(request_id)
        if part is None:
            return False
        if not part.prefilled:
            self._drop_prefill(request_id, part)
        self.shares_no_more(request_id)
        del self._placements[request_id]
        self._unclaimed.pop(request_id, None)
        part.decode.decodes_changed(-1, -part.blocks)
        self._forget(request_id, part.decode)
        return True

    def drop_instance(self, state: InstanceState) -> None:
        """Forgets what was placed on an instance that is gone: requests decoded there, and prefill parts of others."""
        for request_id in list(self._by_instance.get(state, ())):
            part = self._placements[request_id]
            if part.decode is state:
                self.release(request_id)
            else:
                self._drop_prefill(request_id, part)

    def expire(self, now_s: float) -> int:
        """Forgets parts that are too old, and placements that nobody claimed; returns the number of parts."""
        before = len(self._prefills) + len(self._placements)
        for request_id in _leading(self._unclaimed, lambda since_s: since_s <= now_s - self._unclaimed_s):
            self.release(request_id)
        for request_id in _leading(self._prefills, lambda part: part.placed_s <= now_s - self._prefill_s):
            self._prefill_over(request_id, self._prefills[request_id], now_s)
        for request_id in _leading(self._placements, lambda part: part.placed_s <= now_s - self._decode_s):
            self.release(request_id)
        count = before - len(self._prefills) - len(self._placements)
        self.expired += count
        return count

    def _prefill_over(self, request_id: str, part: _Placement, now_s: float) -> None:
        self._drop_prefill(request_id, part)
        if not part.claimed:  # from now on the decode instance should have it
            self._unclaimed.setdefault(request_id, now_s)

    def _drop_prefill(self, request_id: str, part: _Placement) -> None:
        state = part.prefill
        part.prefilled, part.request, part.decision = True, None, None
        del self._prefills[request_id]
        if not part.begun:
            state.loads.count(state.row, part.prefill_us, -1)
        else:
            state.computing -= 1
            if not state.computing:
                state.loads.ends_s[state.row] = 0.0
        self._reads_over(part)
        if part.expected:
            self.expected.remove(state, part.expected)
            self._expected_keys -= len(part.expected) // KEY_BYTES
            part.expected = b""  # the limit is one of memory
        if part.decode is not state:
            self._forget(request_id, state)

    def _reads_over(self, part: _Placement) -> None:
        """Stops counting a prompt's fetches: what it reuses is there, or nobody needs it any more."""
        part.prefill.inflight_transfer_us -= part.transfer_us
        self._count_reads(part, -1)
        part.transfer_us, part.fetches = 0, ()

    @staticmethod
    def _count_reads(part: _Placement, sign: int) -> None:
        reader = part.prefill
        for span in part.fetches:
            source, kind = span.source, path_kind(reader, span.source)
            source.inflight_reads += sign * span.block_count
            if kind is NETWORK or kind is SSD:
                size = sign * span.block_count * reader.block_bytes
                source.sending_bytes += size
                source.sendings += sign
                reader.reading_bytes += size
                reader.readings += sign

    def _remember(self, request_id: str, state: InstanceState) -> None:
        requests = self._by_instance.get(state)
        if requests is None:
            self._by_instance[state] = {request_id: None}
        else:
            requests[request_id] = None

    def _forget(self, request_id: str, state: InstanceState) -> None:
        requests = self._by_instance[state]
        del requests[request_id]
        if not requests:
            del self._by_instance[state]

    def check_integrity(self) -> None:
        """Asserts that the books agree (for tests and idle times)."""
        parts = self._placements.items()
        there = {(key, part.decode) for key, part in parts} | {
            (key, part.prefill) for key, part in parts if not part.prefilled
        }
        assert there == {(key, state) for state, requests in self._by_instance.items() for key in requests}
        assert self._unclaimed.keys() <= self._placements.keys()
        prompts = [part for part in self._placements.values() if not part.prefilled]
        assert [*self._prefills.values()] == prompts
        assert not any(part.expected for part in self._placements.values() if part.prefilled)
        assert self._expected_keys == sum(len(part.expected) // KEY_BYTES for part in prompts)
        assert self.expected.pairs <= self._expected_keys
        for state in self._by_instance:
            assert state.computing == sum(part.begun for part in prompts if part.prefill is state)
            assert state.queued_prefill_us == sum(part.prefill_us for part in prompts if part.prefill is state)


def _leading(parts: dict[str, Part], old: Callable[[Part], bool]) -> list[str]:
    """Returns the ids of the old parts: they are in front, as the dict is ordered by age."""
    return [request_id for request_id, _ in takewhile(lambda item: old(item[1]), parts.items())]
