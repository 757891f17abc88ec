"""The servers of instances: their connections, the adapters that they list, and how they tokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pinyon.core.address import is_loopback, parse_address
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.instances.clusters import Clusters
from pinyon.frontdoor.instances.prompts import Prompts
from pinyon.frontdoor.servers.comparison import differences
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.frontdoor.upstreams.server import Server
from pinyon.frontdoor.upstreams.url import parse_upstreams
from pinyon.frontdoor.upstreams.watch import discover_models
from pinyon.placement.instances import InstanceInfo
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

LIST_S: Final = 10.0
"""The time between two questions for a server's adapters."""
SILENT_S: Final = 5.0
"""The time for which a server may say nothing, whose instance is gone and which is not well."""
HEALTH_BYTES_MAX: Final = 64 << 10
AGAIN_S: Final = 1.0
"""The time until a server that did not answer is asked again."""

_log = get_logger("lb.servers")


class InstanceServer:
    """The server of one instance, for as long as the same process is there."""

    def __init__(self, info: InstanceInfo, server: Server) -> None:
        self.info, self.server = info, server
        self.adapters: Mapping[str, Mapping[str, Any]] = {}
        """The adapters that the server lists, by name, as it describes them."""
        self.compared = False
        self.differs: Mapping[str, str] = {}
        """The kinds of prompts of which the server makes other tokens, with where they differ."""
        self.gone = False
        self.answers: dict[Forward, Answer] = {}
        """The answers under way."""
        self.task: asyncio.Task[None] | None = None

    def ended(self) -> None:
        """Counts the end of an attempt; the last one at a server that is gone closes it."""
        self.server.outstanding -= 1
        self.let_go()

    async def end_when_silent(self) -> None:
        """Breaks off what is under way at an instance that is gone: its engine may have ended, and not every server
        says so to its clients. A server that is well goes on, and answers from which something came just now."""
        seen: dict[Forward, int] = {}
        while self.server.outstanding:
            await asyncio.sleep(SILENT_S)
            well, events = await self._is_well(), {each: _events(each) for each in self.answers}
            if not well:
                self.server.pool.break_unanswered()
                for forward in [each for each, count in events.items() if seen.get(each) == count]:
                    if (answer := self.answers.get(forward)) is not None:
                        answer.close()
                        answer.broke("The instance is gone, and its server says nothing more.")
            seen = events

    async def _is_well(self) -> bool:
        try:
            status, _ = await self.server.ask(b"/health", SILENT_S, HEALTH_BYTES_MAX)
        except Unavailable:
            return False
        return status < 500

    def let_go(self) -> None:
        if self.gone and not self.server.outstanding:
            self.server.close()


def _events(forward: Forward) -> int:
    return 0 if forward.passing is None else forward.passing.events


class InstanceServers:
    """The servers of all instances of ``clusters``: :meth:`update` at each new list → ``close``. The function ``make``
    makes one of a URL; ``prompts`` are those of the models that have a folder here."""

    def __init__(self, clusters: Clusters, prompts: Mapping[str, Prompts], make: Callable[[Any], Server]) -> None:
        self._clusters, self._prompts, self._make = clusters, prompts, make
        self._known: dict[str, InstanceServer] = {}
        self._refused: set[tuple[str, str]] = set()
        """The instances that are listed now with a URL that is not asked, and their boots."""
        self._leaving: set[asyncio.Task[None]] = set()
        """The tasks that wait for the ends of answers at instances that are gone."""
        self._met = False
        self._warned: set[tuple[str, str]] = set()
        """The models about which somebody was warned, with the subject."""

    def __iter__(self) -> Iterator[InstanceServer]:
        return iter(self._known.values())

    def __bool__(self) -> bool:
        """Returns whether there was ever one: its model stays one of servers."""
        return self._met

    def get(self, instance_id: str) -> InstanceServer | None:
        return self._known.get(instance_id)

    def update(self) -> None:
        """Takes the instances that are listed now."""
        listed = {name: info for cluster in self._clusters for name, info in cluster.servers.items()}
        for name, known in list(self._known.items()):
            info = listed.get(name)
            if info is None or (info.boot_id, info.server_url) != (known.info.boot_id, known.info.server_url):
                self._drop(name, known)
        self._refused.intersection_update((name, info.boot_id) for name, info in listed.items())
        for name, info in listed.items():
            if name not in self._known and (name, info.boot_id) not in self._refused:
                self._add(name, info)

    def _add(self, name: str, info: InstanceInfo) -> None:
        self._met = True
        try:
            (url,) = parse_upstreams(info.server_url)
            hosts = {url.host.lower(), parse_address(info.address)[0].lower()}
            if len(hosts) > 1 and not all(map(is_loopback, hosts)):
                raise InvalidArgument(f"it is not at {info.address}: register both with one advertise_host")
        except (InvalidArgument, ValueError) as error:
            self._refused.add((name, info.boot_id))
            _log.warning("the server %.200r of %s gets no requests: %s", info.server_url, name, error)
            return
        known = self._known[name] = InstanceServer(info, self._make(url))
        known.task = asyncio.create_task(self._ask_forever(known), name=f"server of {name}")

    def _drop(self, name: str, known: InstanceServer) -> None:
        del self._known[name]
        if known.task is not None:
            known.task.cancel()
        known.gone = True
        known.let_go()
        if known.server.outstanding:
            task = asyncio.create_task(known.end_when_silent(), name=f"end of {name}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        known = list(self._known.values())
        self._known.clear()
        await ended(*[each.task for each in known], *self._leaving)
        for each in known:
            each.server.close()

    # -- what they serve

    def base_of(self, adapter: str) -> str:
        """Returns the model that has this adapter at some server; empty if none has it."""
        return next((each.info.model for each in self if adapter in each.adapters), "")

    def named(self, adapter: str) -> str:
        """Returns the adapter as block keys have it: with its path at the server, if it says so."""
        said = next((each.adapters[adapter] for each in self if adapter in each.adapters), {})
        return f"{adapter}\0{said.get('root') or ''}"

    def lacking(self, model: str, adapter: str) -> set[str]:
        """Returns the instances of the model that do not list this adapter."""
        return {name for name, each in self._known.items() if each.info.model == model and adapter not in each.adapters}

    def described(self) -> dict[str, Mapping[str, Any]]:
        """Returns the adapters of all servers by name, as OpenAI's interface describes models."""
        return {name: said for each in self for name, said in each.adapters.items()}

    def differs(self, model: str, kinds: frozenset[str]) -> bool:
        """Returns whether a server of the model makes other tokens of such prompts than we do."""
        return any(not kinds.isdisjoint(each.differs) for each in self if each.info.model == model)

    # -- questions

    async def _ask_forever(self, known: InstanceServer) -> None:
        while True:
            pause_s = LIST_S
            try:
                await self._ask(known)
            except Unavailable:
                pause_s = AGAIN_S
            except Exception:
                _log.exception("what the server of %s serves is not known", known.info.instance_id)
            await asyncio.sleep(pause_s)

    async def _ask(self, known: InstanceServer) -> None:
        model = known.info.model
        if not known.compared:
            if (prompts := self._prompts.get(model)) is None:
                self.warn(model, "folder", "no folder of it is named (--more-models)")
            elif (found := await differences(known.server, prompts)) is None:
                self.warn(
                    model,
                    "unasked",
                    "its servers tell nothing at /tokenize, so it is not known if we tokenize as they do",
                )
            elif found:
                known.differs = found
                said = "; ".join(f"{kind} ({where})" for kind, where in found.items())
                self.warn(model, "differs", f"{known.server.name} makes other tokens of these prompts: {said}")
            known.compared = True
        listed = await discover_models(known.server)
        if not isinstance(listed, str):
            known.adapters = {
                name: {"object": "model", "created": 0, "owned_by": "pinyon", **said, "id": name}
                for name, said in listed.items()
                if name != model and model in (said.get("parent"), said.get("root"))
            }

    def warn(self, model: str, subject: str, why: str) -> None:
        """Says once for each subject why a model's requests are not placed by exact block keys."""
        if (model, subject) not in self._warned:
            self._warned.add((model, subject))
            then = "block keys are used" if subject == "unasked" else "such requests are placed by their text"
            _log.warning("%s: %s; %s", model, why, then)
