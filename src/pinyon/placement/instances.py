"""What the conductor knows of one instance: what it is, its last report, and what was placed on it since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.core.shared_prefix import SharedPrefix
from pinyon.placement.cost_model import DecodeCostModel, PrefillCostModel
from pinyon.placement.load_table import LoadTable
from pinyon.placement.transfer_cost import PathKind, SendRate, TransferCostModel

KvGroup = tuple[str, str, str]
"""(model name, fingerprint of the weights, layout id): KV moves only between instances that agree in all three."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What an instance said of itself when it registered; never changes during one boot of it.

    ``layout`` is None for store nodes. A limit of 0 (``max_batch``, ``max_context_tokens``, ``capacity_blocks``) means
    that the instance named none.
    """

    instance_id: str
    boot_id: str
    role: Role
    address: str
    model: str = ""
    model_fingerprint: str = ""
    layout: KvLayout | None = None
    capacity_blocks: int = 0
    max_batch: int = 0
    max_context_tokens: int = 0
    key_secret_id: str = ""
    """Names the secret that its block keys start from (:func:`pinyon.core.block_keys.secret_id`)."""
    stages: int = 1
    """Nodes with a part of the layers each; a prompt's chunks pass through one behind the other (Mooncake §3.3)."""
    chunk_tokens: int = 0
    """Of a prompt, that pass through them together at most; 0: all."""
    on_ssd: bool = False
    """A store node that keeps its blocks on SSDs."""
    short_first: bool = False
    """Its order of service computes short prompts before long ones."""

    @property
    def group(self) -> KvGroup:
        return (self.model, self.model_fingerprint, self.layout.layout_id if self.layout else "")


# Not frozen: one is made of each report, and what is frozen takes five times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class InstanceLoad:
    """The last load report: requests, prompt tokens, KV blocks, and milliseconds between tokens (0: none decoded).
    Nobody changes one."""

    pending_requests: int = 0
    running_requests: int = 0
    pending_prefill_tokens: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    mean_tbt_ms: float = 0.0
    mean_batch: float = 0.0
    """Requests in the batch in the mean of the same tokens; 0: nobody said."""
    mean_kv_tokens: float = 0.0
    """Tokens whose KV the batch read, likewise."""
    kv_tokens: int = 0
    """Tokens whose KV the batch reads now."""
    room_wait_ms: float = 0.0
    """How long a new request would wait for KV blocks; 0 while nobody waits."""
    draining: bool = False
    failed_sources: frozenset[str] = frozenset()
    """Addresses that it leaves alone as sources of KV, because what it asked of them did not come."""
    level_blocks: int = 0
    """It reads once what requests share that it decodes, and knows that by levels of so many blocks; 0: it does not."""
    shared: tuple[SharedPrefix, ...] = ()
    """What requests that it decodes have in common."""
    waiting_for_room: int = 0
    """Requests and prompts: see :class:`pinyon.decisions.BatchRoom`."""
    room: int = 0
    """So many more would have room at once."""

    def read_once(self, kv_tokens: float, block_tokens: int) -> float:
        """Of so many tokens of KV that the batch has, those that it reads if it reads once what was reported to be
        shared. Who waits for a place in the batch counts in ``shared``, too."""
        if not self.shared:
            return kv_tokens
        again = sum([(each.requests - 1) * each.blocks for each in self.shared]) * block_tokens
        present = self.running_requests / max(1, self.running_requests + self.pending_requests)
        return max(0.0, kv_tokens - again * present)


NO_LOAD = InstanceLoad()
COUNT_MAX: Final = 1 << 52
"""An instance may say any number; more than this is as good as this."""
BATCH_DEFAULT: Final = 256
"""For instances that name no limit."""
COMING_MAX: Final = 2
"""While what is placed here is at most so many times what is decoded, as many go as come, and the batch reads as much
when a new request is in it as now; else all that comes counts."""
_KINDS: Final = tuple(PathKind)
OVERFULL: Final = 1.01
"""Share of an instance where somebody waits for blocks, whatever is free."""


@dataclass(slots=True, eq=False)
class InstanceState:
    """One live instance. Owned by the :class:`~pinyon.placement.fleet.Fleet`; policies only read it.

    ``bit`` is what the block index knows the instance by; nobody else looks at it. The ``inflight_*`` sums are what
    placements added and no report has taken back yet; they are integers, so that they return to exactly zero.
    ``*_learned_s`` are when each cost was measured last, or should have been: a request was placed for that. An
    estimate that keeps work away keeps measurements away too, so it must not hold for ever.
    """

    info: InstanceInfo
    bit: int
    load: InstanceLoad = NO_LOAD
    connected: bool = True
    prefill_model: PrefillCostModel = field(default_factory=PrefillCostModel)
    transfer_model: TransferCostModel = field(default_factory=TransferCostModel)
    decode_model: DecodeCostModel = field(default_factory=DecodeCostModel)
    prefill_ended_s: float = 0.0
    """When a prompt was computed last."""
    prefill_learned_s: float = 0.0
    transfer_learned_s: float = 0.0
    loads: LoadTable = field(default_factory=LoadTable)
    """Of all instances; this one's row is :attr:`row`."""
    row: int = 0
    computing: int = 0
    """Of the placements, those whose prompts are being computed."""
    send_rate: SendRate = field(default_factory=SendRate)
    inflight_transfer_us: int = 0
    """Of fetches by this instance, of prompts that are not being computed yet."""
    sending_bytes: int = 0
    """Of fetches from here over the network, of such prompts."""
    sendings: int = 0
    """How many those are."""
    reading_bytes: int = 0
    """The same of fetches by this instance."""
    readings: int = 0
    inflight_decodes: int = 0
    inflight_decode_blocks: int = 0
    """Changed by :meth:`decodes_changed` alone, as the table must follow."""
    inflight_reads: int = 0
    """Blocks that such prompts fetch from here."""
    host: str = field(init=False)
    """Of its address; empty: nobody knows."""
    block_bytes: int = field(init=False)
    """Of its layout, which would work it out each time; 0 where it has none."""
    gone: bool = False
    """It has left: its row may be another one's."""

    def __post_init__(self) -> None:
        self.host = self.info.address.rpartition(":")[0]
        layout = self.info.layout
        self.block_bytes = 0 if layout is None else layout.block_bytes

    @property
    def schedulable(self) -> bool:
        """Whether new requests are placed here, or new fetches made from here."""
        return self.connected and not self.load.draining

    @property
    def queued_prefill_us(self) -> int:
        """Predicted for what was placed here and has not begun."""
        return self.loads.queued_us[self.row]

    def prefill_queue_s(self, now_s: float) -> float:
        """Seconds of prefill work ahead of a new request (Mooncake §4.1: the sum of the queued prefill times)."""
        return self.loads.queue_s(self.row, now_s)

    def turn(self, prefill_s: float, now_s: float, *, in_order: bool = True) -> tuple[float, int]:
        """As :meth:`LoadTable.turns`, of this one; not ``in_order``: as if prompts were computed as they come."""
        if not in_order or not self.info.short_first:
            return self.prefill_queue_s(now_s), 0
        return self.loads.turn(self.row, prefill_s, now_s)

    def wait_s(self, now_s: float) -> float:
        """Seconds until a new request's prompt is computed here: it waits for KV memory, then for its turn."""
        return self.prefill_queue_s(now_s) + self.loads.room_s[self.row]

    def drain_s(self, tokens: int, reused: int, queue_s: float) -> float:
        """Seconds from when the first of several nodes has computed its part of such a prompt until all have. Others do
        not wait for it: what is queued and learned is the time of the first node. Its last long chunk takes as long on
        each of the further ones as there; a shorter one behind it is there hardly later. A prompt of less than a chunk
        passes through them with what was queued before it, as far as that fits into a step."""
        further, most, model = self.info.stages - 1, self.info.chunk_tokens, self.prefill_model
        if not further:
            return 0.0
        chunk = min(tokens - reused, most or tokens)
        part_s = model.predict_s(tokens, tokens - chunk)
        if chunk < most:
            part_s = max(part_s, min(part_s + queue_s, model.predict_s(most, 0)))
        return further * part_s

    def learned(self) -> None:
        """The prefill or the transfer cost model has changed."""
        self.loads.learned(self.row, self.prefill_model.coefficients)
        self.reported()

    def decode_learned(self, now_s: float) -> None:
        """The decode cost model has changed, or should have: a request was placed for that."""
        self.loads.decode_learned_s[self.row] = now_s
        self.decodes_changed(0, 0)

    @property
    def decode_learned_s(self) -> float:
        return self.loads.decode_learned_s[self.row]

    def reported(self) -> None:
        """Or what was reported has."""
        load, row = self.load, self.row
        tokens = load.pending_prefill_tokens
        self.loads.reported_s[row] = self.prefill_model.backlog_s(tokens) if tokens else 0.0
        self.loads.room_s[row] = load.room_wait_ms * 1e-3
        self.loads.decoding[row] = load.running_requests + load.pending_requests
        if not self.gone:
            self.loads.prefixes.reported(row, load.level_blocks, load.shared)
        self.decodes_changed(0, 0)

    def transfers_learned(self) -> None:
        """The transfer cost model has changed."""
        self.loads.transfers_learned(self.row, [self.transfer_model.coefficients(kind) for kind in _KINDS])

    def seen(self) -> None:
        """It is new in the table."""
        self.loads.short_first[self.row] = self.info.short_first
        self.loads.host[self.row] = xxhash.xxh3_64_intdigest(self.host.encode()) >> 1 or 1 if self.host else 0

    def sends(self, reads: int, blocks: int, size_bytes: int) -> None:
        """So many fetches from here are under way more, or fewer; ``size_bytes`` of them over the network."""
        self.inflight_reads += blocks
        if size_bytes:
            self.sending_bytes += size_bytes
            self.sendings += reads

    def reads(self, reads: int, size_bytes: int) -> None:
        """So many fetches by this instance over the network are under way more, or fewer."""
        self.reading_bytes += size_bytes
        self.readings += reads
        if not self.gone:
            self.loads.reading_bytes[self.row] = float(self.reading_bytes)
            self.loads.readings[self.row] = float(self.readings)

    def decodes_changed(self, requests: int, blocks: int) -> None:
        """So many more (or fewer) are placed here, which hold so many KV blocks; or what was reported has changed."""
        self.inflight_decodes += requests
        self.inflight_decode_blocks += blocks
        loads, row, requests = self.loads, self.row, self.decoding_requests()
        share = (requests + 1) / (self.info.max_batch or BATCH_DEFAULT)
        loads.batch[row] = requests
        loads.blocks[row] = float(min(self.blocks_in_use(), COUNT_MAX))
        loads.slots[row] = share if self.load.room_wait_ms <= 0 else max(share, OVERFULL)
        loads.tbt_s[row], loads.tbt_token_s[row] = self._tbt()
        loads.tbt_request_s[row] = self.decode_model.coefficients[1]

    def decode_s(self, new_tokens: int) -> float:
        """As :meth:`LoadTable.decodes_s`, of this one."""
        tbt_s, token_s = self._tbt()
        return tbt_s + token_s * new_tokens

    def _tbt(self) -> tuple[float, float]:
        """Seconds between tokens with one request more, and for each token of KV that it brings. What has no slot in
        the batch is not read meanwhile."""
        wanted = self.decoding_requests() + 1
        batch = min(wanted, self.info.max_batch or BATCH_DEFAULT)
        block_tokens = 1 if self.info.layout is None else self.info.layout.block_tokens
        tokens = self.load.read_once(self.load.kv_tokens, block_tokens)
        if self.inflight_decodes > COMING_MAX * self.load.running_requests and self.info.layout is not None:
            tokens = max(tokens, self.inflight_decode_blocks * block_tokens)
        base, per_request, per_token = self.decode_model.coefficients
        token_s = per_token * (batch / wanted)
        return base + per_request * batch + token_s * tokens, token_s

    @property
    def prefill_idle(self) -> bool:
        """Nothing to compute: neither placed nor reported."""
        return not self.queued_prefill_us and not self.computing and not self.load.pending_prefill_tokens

    def decoding_requests(self) -> int:
        """Requests decoding or about to: reported, or placed here and not reported as ended."""
        return max(self.load.running_requests + self.load.pending_requests, self.inflight_decodes)

    def blocks_in_use(self) -> int:
        """KV blocks that requests hold or will hold, and that reuse cannot give back."""
        return max(self.load.used_blocks, self.inflight_decode_blocks)


class Neighbours:
    """Who is on the host of a source, so that what it fetches from there goes over no network. Of some members of a
    fleet, by host; made once for as long as they are the same."""

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
