"""The last known instances: those that the conductor listed, and this load balancer's requests on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.avoidance import Avoidance
from pinyon.core.block_keys import BlockKey, namespace, secret_id
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.frontdoor.instances.conductor_session import ConductorSession
from pinyon.messages.instance import info_from_proto
from pinyon.placement.instances import InstanceInfo
from pinyon.routing.layer import Layer
from pinyon.routing.pair import PairCandidate, choose_pair, serving_groups
from pinyon.routing.roster import Roster
from pinyon.routing.target import UNKNOWN, Report, Routed, Target
from pinyon.runtime.logging import get_logger

TENANTS_MAX = 4096
INSTANCES_MAX = 4096
FIRST_PAUSE_S = 2.5
"""The pause before an instance that failed a request is tried again without any news of it."""
MAX_PAUSE_S = 5.0
NOTHING = Routed()

_log = get_logger("lb")


@dataclass(frozen=True, slots=True)
class ModelView:
    """The properties that all instances of a model share. ``max_context`` is in tokens, 0 if no instance named it."""

    model_fingerprint: str
    layout: KvLayout
    max_context: int


@dataclass(frozen=True, slots=True)
class _Instance:
    """An instance as it was listed last."""

    info: InstanceInfo
    candidate: PairCandidate
    schedulable: bool
    draining: bool


class ConductorCluster:
    """One cluster: the instances known there. They are kept while the conductor is away, and while a new one does not
    know them yet (:class:`Roster`), so that serving goes on."""

    conductor: ConductorSession
    """The session with its conductor."""

    def __init__(
        self,
        layers: Callable[[str], Layer | None],
        grace_s: float = 10.0,
        secret: bytes = b"",
        announce: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Takes ``layers``, which returns for each model served here the layer whose targets are its instances, and the
        cluster's ``secret``, from which block keys start. Instances with another secret are left out. Instances with a
        server ``announce`` their models, before these need layers."""
        self._announce = announce
        self.expired: Callable[[], object] = lambda: None
        """A callback for instances that were forgotten without a new list."""
        self.servers: dict[str, InstanceInfo] = {}
        """The instances that have an OpenAI-compatible server, by id."""
        self.by_servers: frozenset[str] = frozenset()
        """The models of those instances."""
        self._over_http: dict[str, set[str]] = {}
        """The instances that have a server, by model, whether they are used or not."""
        self._outranked: frozenset[str] = frozenset()
        """The instances with a server that are not used, as pinyon's own instances serve the same model."""
        self.removed: frozenset[str] = frozenset()
        """The instances that get no new requests, as the controller says."""
        self.layers = layers
        self._secret = secret
        self._secret_id = secret_id(secret)
        self._strangers: frozenset[str] = frozenset()
        """The instances with another secret, as listed last."""
        self._roster = Roster(grace_s)
        self.failures = Avoidance(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, max_peers=INSTANCES_MAX)
        """The instances that failed a request: they are avoided for a while, or until there is news of them."""
        self._instances: dict[str, _Instance] = {}
        self._at: dict[str, tuple[str, str]] = {}
        """The model and id of each instance, by address."""
        self._candidates: dict[str, list[PairCandidate]] = {}
        self._doubtful: dict[str, list[PairCandidate]] = {}
        """The instances that the conductor has lost sight of, although they do not leave."""
        self._models: dict[str, ModelView] = {}
        self._changed = asyncio.Event()
        self.addresses: frozenset[str] = frozenset()
        self.in_flight = 0
        """The requests counted on instances, once per role."""

    @property
    def unconfirmed(self) -> int:
        """The number of instances that the present conductor has not listed yet."""
        return len(self._roster.unconfirmed)

    def doubts(self, model: str) -> bool:
        """Returns whether there may be more instances of the model than those that the conductor places on."""
        return bool(self._roster.unconfirmed or self._doubtful.get(model))

    def update(
        self, message: conductor_pb2.InstanceList, now_s: float, first: bool = False
    ) -> tuple[set[str], set[str]]:
        """Takes a new list; ``first`` if its conductor has just begun to answer. Inconsistent instances (no layout, no
        role) are left out.

        Returns the addresses of instances that came, came back or restarted, and those among them at which another
        process was before."""
        before, listed = self._instances, _parsed(message)
        self._leave_out_strangers(listed)
        unsure = before.keys() if first else self._roster.unconfirmed
        self._roster.listed(
            (each.info.instance_id for each in message.instances), now_s, first=first, incomplete=message.incomplete
        )
        renewed: set[str] = set()
        restarted: set[str] = set()
        for instance_id, instance in listed.items():
            old, address = before.get(instance_id), instance.info.address
            same = old is not None and (old.info.boot_id, old.info.address) == (instance.info.boot_id, address)
            if old is not None and not same:
                restarted.add(address)
            known = same and instance_id not in unsure and old is not None and old.schedulable
            if instance.schedulable and not known:
                self.failures.succeeded(instance_id)  # it has restarted or come back
                renewed.add(address)
        taken = {each.info.address for each in listed.values()}
        for instance_id in self._roster.unconfirmed:
            kept = before.get(instance_id)
            if kept is None or kept.info.address in taken:  # another instance has its address
                self._roster.forget(instance_id)
            else:
                listed[instance_id] = kept
        self._take(listed, now_s)
        return renewed, restarted

    def _leave_out_strangers(self, listed: dict[str, _Instance]) -> None:
        strangers = frozenset(name for name, each in listed.items() if each.info.key_secret_id != self._secret_id)
        for name in strangers:
            del listed[name]
        if strangers - self._strangers:
            _log.warning("not used, their block keys start from another secret: %s", ", ".join(sorted(strangers)))
        self._strangers = strangers

    def _expire(self, now_s: float) -> None:
        """Forgets the instances that no conductor has listed again in time."""
        unconfirmed = self._roster.unconfirmed
        if self._roster.expire(now_s):
            _log.info("forgot instances that the conductor does not list: %s", ", ".join(sorted(unconfirmed)))
            self._take({name: each for name, each in self._instances.items() if name not in unconfirmed}, now_s)
            self.expired()

    def _sort_out_servers(self, instances: dict[str, _Instance]) -> None:
        ready: dict[str, list[PairCandidate]] = {}
        for each in instances.values():
            if not each.info.server_url and each.schedulable:
                ready.setdefault(each.info.model, []).append(each.candidate)
        own = {model for model, candidates in ready.items() if serving_groups(candidates, 1)}
        infos = {name: each.info for name, each in instances.items() if each.info.server_url}
        self._over_http = {}
        for name, info in infos.items():
            self._over_http.setdefault(info.model, set()).add(name)
        outranked = frozenset(name for name, info in infos.items() if info.model in own)
        for name in outranked:
            del instances[name], infos[name]
        if outranked - self._outranked:
            _log.warning("not used, as pinyon's own instances serve the same model: %s", ", ".join(sorted(outranked)))
        self._outranked, self.servers = outranked, infos
        self.by_servers = frozenset(info.model for info in infos.values())
        for name in [name for name, each in instances.items() if each.info.model in self.by_servers]:
            if name not in infos:
                instances[name] = instances.pop(name)  # the first one of a model says what it is
        for model in self.by_servers:
            self._announce(model)

    def _take(self, instances: dict[str, _Instance], now_s: float) -> None:
        self._sort_out_servers(instances)
        self._sync(instances, now_s)
        candidates: dict[str, list[PairCandidate]] = {}
        doubtful: dict[str, list[PairCandidate]] = {}
        models: dict[str, ModelView] = {}
        for instance in instances.values():
            info = instance.info
            model, max_context = info.model, info.max_context_tokens
            known = models.get(model)
            if known is None:
                assert info.layout is not None
                models[model] = ModelView(info.model_fingerprint, info.layout, max_context)
            elif max_context and (not known.max_context or max_context < known.max_context):
                models[model] = ModelView(known.model_fingerprint, known.layout, max_context)
            if instance.info.server_url and not instance.info.role.decodes:
                continue  # a conductor sends prompts there; nobody else does
            if instance.schedulable:
                candidates.setdefault(model, []).append(instance.candidate)
            elif not instance.draining:
                doubtful.setdefault(model, []).append(instance.candidate)
        self._instances, self._candidates, self._models = instances, candidates, models
        self._at = {each.info.address: (each.info.model, name) for name, each in instances.items()}
        self._doubtful = doubtful
        self.addresses = frozenset(each.address for found in candidates.values() for each in found)
        self._changed.set()
        self._changed = asyncio.Event()

    def _sync(self, instances: dict[str, _Instance], now_s: float) -> None:
        """Gives the layers the same targets. A restarted instance has nothing of what it was sent before."""
        before = self._instances
        for name, old in before.items():
            new = instances.get(name)
            if new is None or new.info.model != old.info.model:
                layer = self.layers(old.info.model)
                if layer is not None:
                    layer.leave(name)
        for name, new in instances.items():
            layer = self.layers(new.info.model)
            if layer is None:
                continue
            old_one, candidate = before.get(name), new.candidate
            if old_one is None or (old_one.info.boot_id, old_one.candidate) != (new.info.boot_id, candidate):
                layer.join(name, candidate.max_batch, batches=candidate.role.decodes)
                # It gets time until its first report. A server never reports: our requests there are counted.
                layer.report(name, Report(), inf if new.info.server_url else now_s)
            layer.set_draining(name, not new.schedulable)

    def over_http(self, model: str) -> set[str]:
        """Returns the instances of the model that are asked over HTTP, by their servers."""
        return self._over_http.get(model, set())

    def known(self, models: Collection[str]) -> dict[str, str]:
        """Returns the ids of the instances of these models to which sessions are opened, by address."""
        return {
            each.address: each.instance_id
            for model in models
            for each in self._candidates.get(model, ())
            if each.instance_id not in self.servers
        }

    def heard(self, address: str, report: Report, now_s: float, unseen: int = UNKNOWN) -> None:
        """Records the report of the instance at an address, if there is one; ``unseen`` of our requests were on their
        way to it at that time."""
        layer, name = self._place_of(address)
        if layer is not None:
            layer.set_live(name, True)
            layer.report(name, report, now_s, unseen)

    def lost(self, address: str, now_s: float, *, live: bool) -> None:
        """Records that an instance's session has ended: it reports nothing, and the requests sent there are lost. One
        that stays ``live`` is a choice without load, as its last report may never be followed by another."""
        layer, name = self._place_of(address)
        if layer is not None:
            layer.set_live(name, live)
            layer.begin_session(name)
            if live:
                layer.report(name, Report(), now_s)

    def answer_all(self) -> None:
        """Makes every instance a choice again, where no session tells whether one answers."""
        for layer, name in map(self._place_of, self._at):
            if layer is not None:
                layer.set_live(name, True)

    def _place_of(self, address: str) -> tuple[Layer | None, str]:
        model, name = self._at.get(address, ("", ""))
        return self.layers(model), name

    async def wait_change(self, timeout_s: float) -> None:
        """Waits for the next list, at most ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def model(self, name: str) -> ModelView | None:
        """Returns what is common to a model; None if no instance of it was ever listed."""
        return self._models.get(name)

    def servable(self, name: str, now_s: float, total_tokens: int = 1, exclude: Collection[str] = ()) -> bool:
        """Returns whether some pair of instances could take a request."""
        self._expire(now_s)
        return bool(serving_groups(self._candidates.get(name, ()), total_tokens, exclude))

    def lacks(self, name: str, now_s: float, without: Collection[str] = ()) -> str:
        """Returns why the model cannot be served if the instances in ``without`` are not there; empty if it can."""
        self._expire(now_s)
        there = [each for each in self._candidates.get(name, ()) if each.instance_id not in without]
        if serving_groups(there, 1):
            return ""
        prefills = sum(each.role.prefills for each in there)
        decodes = sum(each.role.decodes for each in there)
        if not prefills and not decodes:
            return f"No instance of {name} is available."
        if not decodes:
            return f"No instance of {name} that generates tokens is available ({prefills} that compute prompts are)."
        if not prefills:
            return f"No instance of {name} that computes prompts is available ({decodes} that generate tokens are)."
        return (
            f"No two instances of {name} have the same weights and KV layout, one to compute prompts, one to generate."
        )

    def unvouched(self, name: str, *, everyone: bool) -> list[PairCandidate]:
        """Returns the model's instances that no conductor has listed lately: all of them if ``everyone``."""
        unconfirmed = self._roster.unconfirmed
        known = [each for each in self._candidates.get(name, ()) if each.instance_id not in self.servers]
        return [each for each in known if everyone or each.instance_id in unconfirmed]

    def namespace(self, name: str, tenant: str, cache_salt: str = "") -> BlockKey | None:
        """Returns the start of the key chain for a tenant and salt; None while the model's layout is unknown."""
        known = self._models.get(name)
        if known is None:
            return None
        if cache_salt:
            return namespace(known.model_fingerprint, known.layout.layout_id, tenant, self._secret, cache_salt)
        return _unsalted(known.model_fingerprint, known.layout.layout_id, tenant, self._secret)

    def fingerprint(self, model: str, instance_id: str) -> str:
        """Returns the fingerprint of the weights that an instance has, or should have; empty if unknown."""
        instance, known = self._instances.get(instance_id), self._models.get(model)
        if instance is not None:
            return instance.info.model_fingerprint
        return "" if known is None else known.model_fingerprint

    def keys_fit(self, home: ConductorCluster, model: str, instance_id: str = "") -> bool:
        """Returns whether the block keys of requests mean the same to this instance, or else to the model's. They are
        made by the ``home`` cluster, from its secret, weights and layout."""
        made, instance = home._models.get(model), self._instances.get(instance_id)
        needed = self._models.get(model) if instance is None else instance.info
        if made is None or needed is None or self._secret_id != home._secret_id:
            return self is home
        if made is needed:
            return True
        return (made.model_fingerprint, made.layout) == (needed.model_fingerprint, needed.layout)

    def with_other_weights(self, model: str, fingerprint: str) -> set[str]:
        """Returns the instances of the model that must not continue tokens which those weights have generated."""
        infos = [each.info for each in self._instances.values()]
        return {each.instance_id for each in infos if each.model == model and each.model_fingerprint != fingerprint}

    def leaves(self, instance_id: str) -> bool:
        """Returns whether the instance has said that it takes nothing new, and is there as far as we know."""
        instance = self._instances.get(instance_id)
        return instance is not None and instance.draining

    def choose(
        self,
        model: str,
        total_tokens: int,
        exclude: Collection[str],
        now_s: float,
        routed: Routed = NOTHING,
        careful: bool = False,
    ) -> common_pb2.Placement:
        """Returns a placement made without the conductor; instances that it has lost sight of are the last resort.
        Raises :class:`Unavailable`.

        A failed instance is tried again by one request at a time, when its pause is over. A ``careful`` request, which
        an instance has failed already, avoids it as long as there are others."""
        self._expire(now_s)
        known = self._candidates.get(model, [])
        if not serving_groups(known, total_tokens, exclude):
            known = known + self._doubtful.get(model, [])
        failures = self.failures
        avoided = {
            each.instance_id
            for each in known
            if (each.instance_id in failures if careful else failures.avoids(each.instance_id, now_s))
        }
        layer = self.layers(model)
        groups = serving_groups(known, total_tokens, exclude, avoided)
        pair = None if layer is None else choose_pair(groups, layer, routed, now_s)
        if layer is None or pair is None:
            raise Unavailable("No instance is available for this model.", retry_after_s=1.0)
        failures.tried(pair.prefill.instance_id, now_s)
        failures.tried(pair.decode.instance_id, now_s)
        return common_pb2.Placement(
            prefill_instance_id=pair.prefill.instance_id,
            prefill_address=pair.prefill.address,
            decode_instance_id=pair.decode.instance_id,
            decode_address=pair.decode.address,
            policy=f"lb_{layer.policy.name}",
            ask_store=True,
        )

    def begin(
        self, model: str, placement: common_pb2.Placement, routed: Routed = NOTHING
    ) -> tuple[Target | None, Target | None]:
        """Counts a request on its instances until :meth:`end` is called with the result."""
        self.in_flight += 2
        layer = self.layers(model)
        if layer is None:
            return None, None
        prefill, decode = placement.prefill_instance_id, placement.decode_instance_id
        if prefill == decode:
            return layer.sent(routed, decode), None
        # The decode instance is sent the request and counts it; it tells the prefill instance of the request.
        return layer.sent(routed, prefill, counted=False), layer.sent(NOTHING, decode)

    def end(self, counted: tuple[Target | None, Target | None]) -> None:
        self.in_flight -= 2
        for target in counted:
            Layer.ended(target)


@lru_cache(maxsize=TENANTS_MAX)
def _unsalted(fingerprint: str, layout_id: str, tenant: str, secret: bytes) -> BlockKey:
    return namespace(fingerprint, layout_id, tenant, secret)


def _parsed(message: conductor_pb2.InstanceList) -> dict[str, _Instance]:
    parsed: dict[str, _Instance] = {}
    for instance in message.instances:
        said = _said(instance.info.SerializeToString())
        if said is not None:
            parsed[said[0].instance_id] = _Instance(*said, instance.schedulable, instance.load.draining)
    return parsed


@lru_cache(maxsize=INSTANCES_MAX)
def _said(message: bytes) -> tuple[InstanceInfo, PairCandidate] | None:
    """Returns the description of an instance, cached as each list repeats it; None for store nodes and invalid ones."""
    try:
        info = info_from_proto(conductor_pb2.InstanceInfo.FromString(message))
    except InvalidArgument:
        return None
    if info.layout is None:
        return None
    group = f"{info.model_fingerprint}/{info.layout.layout_id}"
    role = Role.MIXED if info.server_url and info.role.decodes else info.role  # a server can compute as well
    return info, PairCandidate(info.instance_id, info.address, role, group, info.max_batch, info.max_context_tokens)
