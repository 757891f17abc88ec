"""The fleet: all live instances, the block index over them, and the pools that a request may choose from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from pinyon.core.errors import NotFound, ResourceExhausted, Unavailable
from pinyon.core.key_sample import sample_every
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.placement.cost_model import DecodeCostModel, PrefillCostModel
from pinyon.placement.cost_priors import CostPriors
from pinyon.placement.fetch_time import learn_fetch
from pinyon.placement.index import BlockIndex
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.instances import InstanceInfo, InstanceLoad, InstanceState, KvGroup, Sources
from pinyon.placement.load_table import LoadTable
from pinyon.placement.policy import Pool
from pinyon.placement.transfer_cost import READ_BYTES_S_MAX, TransferCostModel

UNLIMITED = 2**63
SIBLINGS_MAX = 64
SHARED_SAMPLES = 16
"""The samples of prefills from which on an instance learns from its own ones only."""
CLOCK_S = 1e-6
"""The resolution of measured seconds, to which they are rounded."""


class Fleet:
    """The owner of the :class:`InstanceState` objects and of what is in flight on them.

    ``version`` grows when an instance joins, leaves, or becomes schedulable or not, and when ``settling`` changes; not
    with each load report. While the fleet is ``settling``, there may be instances that are not known yet."""

    def __init__(
        self,
        index: BlockIndex,
        inflight: InFlightTable,
        instances_max: int,
        together: bool = False,
        priors: Mapping[str, CostPriors] = {},
        stride_tokens: int = 1,
    ) -> None:
        """Starts without instances. ``together``: see :class:`Pool`; so it is with servers in any case. ``priors``:
        costs before anything is measured, by model; ``""`` is for all others. ``stride_tokens``: the tokens between two
        blocks that the index is told of, on average and at most; 1: it is told of all blocks."""
        self.together = together
        self._priors = priors
        self._stride_tokens = stride_tokens
        self.index = index
        self.inflight = inflight
        self.version = 1
        self.settling = False
        self._instances_max = instances_max
        self._by_id: dict[str, InstanceState] = {}
        self._groups: dict[KvGroup, dict[str, InstanceState]] = {}
        self._newcomers: dict[KvGroup, dict[str, InstanceState]] = {}
        """The instances that prefill and whose model has few samples."""
        self.loads = LoadTable()
        self._pools: dict[str, tuple[Pool, ...]] = {}
        self._block_tokens: frozenset[int] = frozenset()
        """Tokens per block, of all known layouts."""

    def __len__(self) -> int:
        return len(self._by_id)

    def instances(self) -> list[InstanceState]:
        """Returns all instances, by id."""
        return sorted(self._by_id.values(), key=lambda state: state.info.instance_id)

    def get(self, instance_id: str) -> InstanceState | None:
        return self._by_id.get(instance_id)

    def settle(self, settling: bool) -> None:
        """Notes whether there may be instances that nobody has heard of yet."""
        if self.settling != settling:
            self.settling = settling
            self.version += 1

    def join(self, info: InstanceInfo, now_s: float) -> InstanceState:
        """Adds a new instance, or a new boot of a known one: then all that was known of the old boot is void.

        Raises :class:`ResourceExhausted` at the limit of instances."""
        if info.instance_id in self._by_id:
            self.leave(info.instance_id)
        if len(self._by_id) >= self._instances_max:
            raise ResourceExhausted(f"the limit of {self._instances_max} instances is reached", retry_after_s=1.0)
        bit = self.index.add()
        row = bit.bit_length() - 1
        self.loads.add(row, info.capacity_blocks, info.short_first)
        priors = self._priors.get(info.model) or self._priors.get("", CostPriors())
        state = InstanceState(
            info,
            bit,
            prefill_model=PrefillCostModel(priors.prefill),
            transfer_model=TransferCostModel(priors.transfer),
            decode_model=DecodeCostModel(priors.decode),
            loads=self.loads,
            row=row,
            prefill_learned_s=now_s,
            transfer_learned_s=now_s,
        )
        self._inherit(state)
        state.learned()
        state.transfers_learned()
        state.decode_learned(now_s)
        self._by_id[info.instance_id] = state
        self._groups.setdefault(info.group, {})[info.instance_id] = state
        newcomers = self._newcomers.setdefault(info.group, {})
        if (info.role.prefills or info.server_url) and state.prefill_model.samples < SHARED_SAMPLES:
            newcomers[info.instance_id] = state
        self._changed()
        return state

    def leave(self, instance_id: str) -> None:
        """Forgets an instance with its blocks and what was in flight on it."""
        state = self._by_id.pop(instance_id)
        group = self._groups[state.info.group]
        del group[instance_id]
        self._newcomers[state.info.group].pop(instance_id, None)
        if not group:
            del self._groups[state.info.group], self._newcomers[state.info.group]
        state.connected = False
        state.gone = True
        self.index.drop(state)
        self.inflight.drop_instance(state)
        self.loads.prefixes.reported(state.row, 0, ())
        self._changed()

    def set_connected(self, state: InstanceState, connected: bool) -> None:
        if state.connected != connected:
            state.connected = connected
            self._changed()

    def set_load(self, state: InstanceState, load: InstanceLoad, now_s: float) -> None:
        """Takes a load report, and learns the time between tokens from it."""
        was = state.schedulable
        state.load = load
        state.send_rate.look(now_s)
        batch = load.mean_batch or load.running_requests
        if load.mean_tbt_ms > 0 and batch:
            layout = state.info.layout
            read = load.read_once(load.mean_kv_tokens or load.kv_tokens, 1 if layout is None else layout.block_tokens)
            state.decode_model.observe(batch, read, load.mean_tbt_ms * 1e-3)
            state.loads.decode_learned_s[state.row] = now_s
        state.reported()  # with what was learned
        if state.schedulable != was:
            self._changed()

    def learn_prefills(self, state: InstanceState, measured: Iterable[tuple[int, int, float]], now_s: float) -> None:
        """Learns from prefills: tokens computed and reused, and seconds without queueing and transfers.

        Siblings with few samples learn from them, too. Else chance decides in a new fleet: whose first measurements
        were slow gets no more requests, so nobody learns that it is as fast as the others."""
        samples = [each for each in measured if each[0] > 0]
        if not samples:
            return
        state.prefill_learned_s = now_s
        newcomers = self._newcomers.get(state.info.group, {})
        for sibling in list(islice(newcomers.values(), SIBLINGS_MAX)):
            if sibling is not state:
                _learn(sibling, samples[: SHARED_SAMPLES - sibling.prefill_model.samples])
                if sibling.prefill_model.samples >= SHARED_SAMPLES:
                    del newcomers[sibling.info.instance_id]
        _learn(state, samples)
        if state.prefill_model.samples >= SHARED_SAMPLES:
            newcomers.pop(state.info.instance_id, None)

    def learn_transfers(
        self, state: InstanceState, measured: Iterable[tuple[int, float, InstanceState | None]], now_s: float
    ) -> None:
        """Learns from measured fetches into the instance: bytes, seconds, and the source if it is the only one and
        known. A fetch that is faster than possible teaches nothing."""
        learned = False
        for size_bytes, seconds, source in measured:
            if not 0 < size_bytes <= READ_BYTES_S_MAX * (seconds + CLOCK_S):
                continue
            if source is None:
                state.transfer_model.observe(size_bytes, seconds)
            else:
                learn_fetch(state, source, size_bytes, seconds, now_s)
            learned = True
        if learned:
            state.transfers_learned()
            state.transfer_learned_s = now_s

    def sample_of(self, layout: KvLayout) -> int:
        """Returns the layout's sampling stride: the index knows one key in so many (:mod:`pinyon.core.key_sample`)."""
        return sample_every(self._stride_tokens, layout.block_tokens)

    def sample_for(self, info: InstanceInfo) -> int:
        """Returns the sampling stride of the keys that the instance should report: that of its layout. A store node has
        blocks of any layout, so it gets the densest one of all layouts."""
        if info.layout is not None:
            return self.sample_of(info.layout)
        return sample_every(self._stride_tokens, max(self._block_tokens, default=1))

    @property
    def has_layouts(self) -> bool:
        """True if there is an instance that computes."""
        return bool(self._block_tokens)

    @property
    def common_sample(self) -> int:
        """The sparsest sampling stride of all layouts: the index knows at least one in so many keys."""
        return sample_every(self._stride_tokens, min(self._block_tokens, default=self._stride_tokens))

    def pools(self, model: str) -> tuple[Pool, ...]:
        """Returns the pools where requests for the model can run; never empty.

        Raises :class:`NotFound` if no known instance serves it, :class:`Unavailable` if there is no instance at all or
        none that serves it can take a request now."""
        pools = self._pools.get(model)
        if pools is None:
            pools = self._build_pools(model)
            if pools:  # misses are not kept: clients choose the names
                self._pools[model] = pools
        if pools:
            return pools
        workers = [state for state in self._by_id.values() if state.info.role is not Role.STORE]
        if not workers:
            raise Unavailable("no instance is registered", retry_after_s=1.0)
        if not any(state.info.model == model for state in workers):
            raise NotFound(f"no instance serves the model {model[:128]!r}", field="model")
        raise Unavailable("no prefill and decode instances of this model are available", retry_after_s=1.0)

    def _build_pools(self, model: str) -> tuple[Pool, ...]:
        members = [state for state in self.instances() if state.schedulable]
        sources = Sources(members)
        groups: dict[KvGroup, list[InstanceState]] = {}
        for state in members:
            if state.info.model == model and state.info.layout is not None:
                groups.setdefault(state.info.group, []).append(state)
        pools = []
        for group_id, group in groups.items():
            layout = group[0].info.layout
            servers = any(state.info.server_url for state in group)
            # A server that decodes can compute prompts as well: short ones stay whole.
            prefills = tuple(state for state in group if servers or state.info.role.prefills)
            decodes = tuple(state for state in group if state.info.role.decodes)
            if layout is not None and prefills and decodes:
                room = min(_tokens_max(state, layout.block_tokens) for state in group)
                known = sum(servers or state.info.role.prefills for state in self._groups[group_id].values())
                asked = 0 if all(state.info.keeps_to_itself for state in prefills) else sources.every
                pools.append(Pool(layout, prefills, decodes, sources, asked, room, known, self.together or servers))
        return tuple(pools)

    def _inherit(self, state: InstanceState) -> None:
        """Starts each cost model from the sibling with the most samples, of the :data:`SIBLINGS_MAX` oldest ones."""
        siblings = list(islice(self._groups.get(state.info.group, {}).values(), SIBLINGS_MAX))
        if not siblings or state.info.layout is None:
            return
        state.prefill_model.copy_from(max(siblings, key=lambda other: other.prefill_model.samples).prefill_model)
        state.transfer_model.copy_from(max(siblings, key=lambda other: other.transfer_model.samples).transfer_model)
        state.decode_model.copy_from(max(siblings, key=lambda other: other.decode_model.samples).decode_model)

    def _changed(self) -> None:
        self.version += 1
        self._pools.clear()
        one_each = (next(iter(group.values())).info.layout for group in self._groups.values())
        self._block_tokens = frozenset(layout.block_tokens for layout in one_each if layout is not None)


def _tokens_max(state: InstanceState, block_tokens: int) -> int:
    """Returns the most tokens of prompt plus generation that the instance can hold at all."""
    context = state.info.max_context_tokens or UNLIMITED
    memory = state.info.capacity_blocks * block_tokens or UNLIMITED
    return min(context, memory)


def _learn(state: InstanceState, samples: Sequence[tuple[int, int, float]]) -> None:
    for computed_tokens, prefix_tokens, seconds in samples:
        state.prefill_model.observe(computed_tokens, prefix_tokens, seconds)
    state.learned()
