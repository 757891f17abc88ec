"""The conductor's knowledge of one instance: what it is, its last report, and what was placed on it since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pinyon.core.block_keys import SharedPrefix
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.cost_model import DecodeCostModel, PrefillCostModel
from pinyon.placement.load_table import LoadTable
from pinyon.placement.transfer_cost import PathKind, SendRate, TransferCostModel

KvGroup = tuple[str, str, str]
"""(model name, fingerprint of the weights, layout id): KV moves only between instances that agree in all three."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The registration of an instance; it never changes during one boot.

    ``layout`` is None for store nodes. A limit of 0 (``max_batch``, ``max_context_tokens``, ``capacity_blocks``) means
    that the instance named none."""

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
    """The name of the secret that its block keys start from (:func:`pinyon.core.block_keys.secret_id`)."""
    stages: int = 1
    """Nodes with a part of the layers each; a prompt's chunks pass through one behind the other (Mooncake §3.3)."""
    chunk_tokens: int = 0
    """The maximum number of a prompt's tokens that pass through the nodes together; 0: all."""
    on_ssd: bool = False
    """True for a store node that keeps its blocks on SSDs."""
    short_first: bool = False
    """True if its order of service computes short prompts before long ones."""
    server_url: str = ""
    """The base URL of its OpenAI-compatible server; empty for instances that load balancers reach at ``address``."""
    keeps_to_itself: bool = False
    """True if it neither fetches KV nor lends it."""
    zone: str = ""
    """The place where a store node is; empty: not said."""

    @property
    def group(self) -> KvGroup:
        return (self.model, self.model_fingerprint, self.layout.layout_id if self.layout else "")


# Not frozen: one is made of each report, and a frozen one takes five times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class InstanceLoad:
    """The last load report: requests, prompt tokens, KV blocks, milliseconds between tokens (0: none decoded). Not
    changed."""

    pending_requests: int = 0
    running_requests: int = 0
    pending_prefill_tokens: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    mean_tbt_ms: float = 0.0
    mean_batch: float = 0.0
    """The mean number of requests in the batch over the same tokens; 0: not reported."""
    mean_kv_tokens: float = 0.0
    """The mean number of tokens whose KV the batch read, likewise."""
    kv_tokens: int = 0
    """Tokens whose KV the batch reads now."""
    room_wait_ms: float = 0.0
    """Milliseconds that a new request would wait for KV blocks; 0 while no request waits."""
    draining: bool = False
    failed_sources: frozenset[str] = frozenset()
    """Addresses that the instance avoids as sources of KV, because what it asked of them did not come."""
    level_blocks: int = 0
    """The instance finds shared prefixes by levels of so many blocks, and reads them once; 0: it does not."""
    shared: tuple[SharedPrefix, ...] = ()
    """Prefixes that the requests decoded there have in common."""
    waiting_for_room: int = 0
    """Requests and prompts that wait for room: see :class:`pinyon.decisions.BatchRoom`."""
    room: int = 0
    """The number of further requests that would have room at once."""

    def read_once(self, kv_tokens: float, block_tokens: int) -> float:
        """Returns how many of the batch's ``kv_tokens`` tokens of KV a step reads if it reads reported shared prefixes
        once. ``shared`` also counts requests that wait for a place in the batch."""
        if not self.shared:
            return kv_tokens
        again = sum([(each.requests - 1) * each.blocks for each in self.shared]) * block_tokens
        present = self.running_requests / max(1, self.running_requests + self.pending_requests)
        return max(0.0, kv_tokens - again * present)


NO_LOAD = InstanceLoad()
COUNT_MAX: Final = 1 << 52
"""The bound of the numbers that instances may report: a larger one counts as this."""
BATCH_DEFAULT: Final = 256
"""The batch limit of instances that name none."""
COMING_MAX: Final = 2
"""The ratio of requests placed here to those decoded up to which as many go as come: the batch reads as much with a new
request as now. Beyond it, all that comes counts."""
_KINDS: Final = tuple(PathKind)
OVERFULL: Final = 1.01
"""The share of slots in use at an instance where a request waits for blocks, whatever is free."""


@dataclass(slots=True, eq=False)
class InstanceState:
    """One live instance. Owned by the :class:`~pinyon.placement.fleet.Fleet`; policies only read it.

    ``bit`` names the instance in the block index and in sets of holders. The ``inflight_*`` sums are what placements
    added and no report has taken back yet; they are integers, so that they return to exactly zero. ``*_learned_s`` are
    when each cost was measured last, or should have been: a request was placed for that. An estimate that keeps work
    away keeps measurements away too, so it must not hold for ever."""

    info: InstanceInfo
    bit: int
    load: InstanceLoad = NO_LOAD
    connected: bool = True
    prefill_model: PrefillCostModel = field(default_factory=PrefillCostModel)
    transfer_model: TransferCostModel = field(default_factory=TransferCostModel)
    decode_model: DecodeCostModel = field(default_factory=DecodeCostModel)
    prefill_ended_s: float = 0.0
    """The time when a prompt's computing ended last."""
    prefill_learned_s: float = 0.0
    transfer_learned_s: float = 0.0
    loads: LoadTable = field(default_factory=LoadTable)
    """The load table of all instances; this one's row is :attr:`row`."""
    row: int = 0
    computing: int = 0
    """Placements here whose prompts are being computed."""
    send_rate: SendRate = field(default_factory=SendRate)
    inflight_transfer_us: int = 0
    """Predicted microseconds of this instance's fetches, for prompts that are not being computed yet."""
    sending_bytes: int = 0
    """Bytes of fetches from here over the network, for such prompts."""
    sendings: int = 0
    """The number of those fetches."""
    reading_bytes: int = 0
    """Bytes of fetches by this instance over the network, likewise."""
    readings: int = 0
    inflight_decodes: int = 0
    inflight_decode_blocks: int = 0
    """Blocks of decode parts placed here. Only :meth:`decodes_changed` changes them, as the table must follow."""
    inflight_reads: int = 0
    """Blocks that prompts which are not being computed yet fetch from here."""
    host: str = field(init=False)
    """The host of its address; empty: unknown."""
    block_bytes: int = field(init=False)
    """The bytes of a block, kept because the layout computes them each time; 0 without a layout."""
    gone: bool = False
    """True once the instance has left: its row may belong to another one."""

    def __post_init__(self) -> None:
        self.host = self.info.address.rpartition(":")[0]
        layout = self.info.layout
        self.block_bytes = 0 if layout is None else layout.block_bytes

    @property
    def schedulable(self) -> bool:
        """True if new requests are placed here, and new fetches made from here."""
        return self.connected and not self.load.draining

    @property
    def queued_prefill_us(self) -> int:
        """Predicted microseconds of the prompts placed here that have not begun."""
        return self.loads.queued_us[self.row]

    def prefill_queue_s(self, now_s: float) -> float:
        """Returns the seconds of prefill work ahead of a request (Mooncake §4.1: the sum of queued prefill times)."""
        return self.loads.queue_s(self.row, now_s)

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until a new request's prompt is computed: the wait for KV memory, then for its turn."""
        return self.prefill_queue_s(now_s) + self.loads.room_s[self.row]

    def drain_s(self, tokens: int, reused: int, queue_s: float) -> float:
        """Returns the seconds from when the first of several nodes has computed its part of a prompt until all have.

        Other requests do not wait for it: what is queued and learned is the time of the first node. The last long chunk
        takes as long on each further node as on the first; a shorter one behind it arrives hardly later. A prompt of
        less than a chunk passes through them with what was queued before it, as far as that fits into a step."""
        further, most, model = self.info.stages - 1, self.info.chunk_tokens, self.prefill_model
        if not further:
            return 0.0
        chunk = min(tokens - reused, most or tokens)
        part_s = model.predict_s(tokens, tokens - chunk)
        if chunk < most:
            part_s = max(part_s, min(part_s + queue_s, model.predict_s(most, 0)))
        return further * part_s

    def learned(self) -> None:
        """Updates the table: the prefill cost model has changed."""
        self.loads.learned(self.row, self.prefill_model.coefficients)
        self.reported()

    def decode_learned(self, now_s: float) -> None:
        """Updates the table: the decode cost model has changed, or should have, as a request was placed for that."""
        self.loads.decode_learned_s[self.row] = now_s
        self.decodes_changed(0, 0)

    @property
    def decode_learned_s(self) -> float:
        return self.loads.decode_learned_s[self.row]

    def reported(self) -> None:
        """Updates the table: the load report, or what was learned, has changed."""
        load, row = self.load, self.row
        tokens = load.pending_prefill_tokens
        self.loads.reported_s[row] = self.prefill_model.backlog_s(tokens) if tokens else 0.0
        self.loads.room_s[row] = load.room_wait_ms * 1e-3
        self.loads.decoding[row] = load.running_requests + load.pending_requests
        if not self.gone:
            self.loads.prefixes.reported(row, load.level_blocks, load.shared)
        self.decodes_changed(0, 0)

    def transfers_learned(self) -> None:
        """Updates the table: the transfer cost model has changed."""
        self.loads.transfers_learned(self.row, [self.transfer_model.coefficients(kind) for kind in _KINDS])

    def decodes_changed(self, requests: int, blocks: int) -> None:
        """Counts ``requests`` more (or fewer) placed here, which hold ``blocks`` KV blocks. Updates the table."""
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
        """Returns the seconds between tokens with one more request, which brings ``new_tokens`` tokens of KV."""
        tbt_s, token_s = self._tbt()
        return tbt_s + token_s * new_tokens

    def _tbt(self) -> tuple[float, float]:
        """Returns the seconds between tokens with one more request, and for each token of KV that it brings. The KV of
        a request without a slot in the batch is not read meanwhile."""
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
        """True if there is nothing to compute, neither placed nor reported."""
        return not self.queued_prefill_us and not self.computing and not self.load.pending_prefill_tokens

    def decoding_requests(self) -> int:
        """Returns how many requests decode or are about to: as reported, or as placed and not reported as ended."""
        return max(self.load.running_requests + self.load.pending_requests, self.inflight_decodes)

    def blocks_in_use(self) -> int:
        """Returns the KV blocks that requests hold or will hold, and that eviction cannot give back."""
        return max(self.load.used_blocks, self.inflight_decode_blocks)


class Sources:
    """All instances that blocks may be fetched from, by their bits, addresses and hosts: fetches from the own host go
    over no network. Made once for some members of a fleet, for as long as they are the same."""

    __slots__ = ("_by_bit", "_near", "_of_address", "every", "near", "on_ssd", "stores")

    def __init__(self, members: Iterable[InstanceState]) -> None:
        by_host: dict[str, list[InstanceState]] = {}
        """Instances that compute prompts."""
        self.every = self.stores = self.on_ssd = self.near = 0
        """Bits of all sources, of store nodes, of those with blocks on SSDs, and of those with blocks in memory and a
        neighbour."""
        self._by_bit = {state.bit: state for state in members}
        self._of_address: dict[str, int] = {}
        for state in self._by_bit.values():
            if not state.info.keeps_to_itself:
                self.every |= state.bit
            self._of_address[state.info.address] = self._of_address.get(state.info.address, 0) | state.bit
            if state.info.role is Role.STORE:
                self.stores |= state.bit
            if state.info.on_ssd:
                self.on_ssd |= state.bit
            if state.host and state.info.role.prefills:
                by_host.setdefault(state.host, []).append(state)
        self._near: dict[int, list[InstanceState]] = {}
        for state in self._by_bit.values():
            here = by_host.get(state.host, [])
            if here and here != [state] and not state.info.on_ssd:
                self.near |= state.bit
                self._near[state.bit] = here

    def among(self, mask: int) -> list[InstanceState]:
        """Returns the sources whose bits are in a mask."""
        by_bit, found = self._by_bit, list[InstanceState]()
        while mask:
            bit = mask & -mask
            found.append(by_bit[bit])
            mask ^= bit
        return found

    def at(self, addresses: Iterable[str]) -> int:
        """Returns the bits of the sources at these addresses."""
        mask = 0
        for address in addresses:
            mask |= self._of_address.get(address, 0)
        return mask

    def named(self, instance_ids: frozenset[str]) -> int:
        """Returns the bits of these instances."""
        return sum([bit for bit, state in self._by_bit.items() if state.info.instance_id in instance_ids])

    def near_to(self, bit: int) -> Sequence[InstanceState]:
        """Returns the instances that compute prompts on the host of the source with this bit, a bit of :attr:`near`.
        The source may be among them."""
        return self._near[bit]
