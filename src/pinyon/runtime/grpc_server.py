"""The gRPC server of every service: health, reflection, error statuses, bounded messages, graceful drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from pinyon.core.address import parse_address
from pinyon.core.errors import Unavailable
from pinyon.runtime.callers import ANYBODY, MEMBERS, Callers, caller_check
from pinyon.runtime.channel import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES
from pinyon.runtime.first_message import MESSAGE_S, Doors, FirstMessages, parsing
from pinyon.runtime.http2 import listener
from pinyon.runtime.http2.server import Http2Server
from pinyon.runtime.interceptors import Interceptor, with_statuses

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls


def _v1_service() -> ServiceDescriptor:
    """Returns v1's service from the default pool, where v1alpha's file is added under the other name if need be.

    grpcio-reflection serves v1alpha only, but newer clients ask for v1 first, and some for nothing else. Only the
    package's name differs, so v1 is made from v1alpha, with the same messages on the wire and the same answers."""
    pool = descriptor_pool.Default()
    name = "grpc.reflection.v1.ServerReflection"
    try:
        return pool.FindServiceByName(name)
    except KeyError:
        pass
    said = MessageToJson(descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
    file = Parse(said.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto())
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName(name)


REFLECTION: tuple[ServiceDescriptor, ...] = (
    _v1_service(),
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)


Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # not in the stubs
    """The health service. With the library's own, a watcher that reads nothing would block whoever sets the status."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {"": Status.SERVING}
        self._news = asyncio.Event()

    def say(self, names: Iterable[str], status: Any) -> None:
        """Sets the status of these services."""
        for name in names:
            self._status[name] = status
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> AsyncIterator[Any]:
        """Yields each change; of several that come before a watcher reads, only the last one."""
        told = None
        while True:
            news, status = self._news, self._status.get(request.service, Status.SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield Status(status=status)
            else:
                await news.wait()


MAX_CONCURRENT_STREAMS = 4096

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_COMMON = (HEALTH, *REFLECTION)
"""The services for all callers that a server admits."""


class GrpcServer:
    """A server: ``add`` the servicers, ``start``, and ``drain`` at the end."""

    def __init__(
        self,
        listen: str,
        tls: Tls | None = None,
        *,
        admin_listen: str = "",
        message_s: float = MESSAGE_S,
        keepalive: tuple[tuple[str, int], ...] = KEEPALIVE_OPTIONS,
        outermost: Sequence[Interceptor] = (),
        sessions: bool = False,
    ) -> None:
        """Makes a server; with ``tls``, clients need certificates of the cluster, and tables given to ``add`` apply.

        With ``admin_listen`` as well, only clients that connect there need one. ``listen`` is then for clients'
        programs without certificates, which reach the methods that are for anybody.

        ``message_s`` limits the wait for a call's message. The interceptors ``outermost`` see every call and how it
        ended. ``sessions`` is for services that other services call often or by long streams: the event loop serves
        all calls (:mod:`pinyon.runtime.http2`). Otherwise grpcio does, which notices a silent peer as ``keepalive``
        says. Clients' programs need grpcio, so ``sessions`` excludes ``admin_listen``."""
        self._listen = listen
        self._admin_listen = admin_listen if tls is not None else ""
        self._tls = tls
        self._callers: dict[str, frozenset[str]] = {}
        self._doors: dict[str, Callable[[Any], str]] = {}
        self._interceptors = (*outermost, with_statuses, *(() if tls is None else (caller_check(self._callers),)))
        self._first_messages = FirstMessages(self._doors, message_s)
        self._server: grpc.aio.Server | Http2Server
        if sessions:
            self._server = Http2Server(None if tls is None else lambda: tls.sessions_context)
        else:
            self._server = grpc.aio.server(
                options=(
                    # Two servers on one port would share its connections silently.
                    ("grpc.so_reuseport", 0),
                    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
                    # Windows that grow with the link's speed hold 4 MB and more of each stream that is not read yet: a
                    # stranger's 300 streams held 1.3 GB. A stream that is read grows its window by its message's
                    # size anyway.
                    ("grpc.http2.bdp_probe", 0),
                    ("grpc.max_allowed_incoming_connections", listener.CONNECTIONS_MAX),
                    ("grpc.server_handshake_timeout_ms", int(listener.HANDSHAKE_S * 1e3)),
                    *keepalive,
                    # Peers ping a silent stream a few times a second; the default would answer with GOAWAY.
                    ("grpc.http2.min_ping_interval_without_data_ms", 200),
                    ("grpc.http2.max_ping_strikes", 0),
                )
            )
        self._health = Health()
        self._names: list[str] = []
        self.stands_for: list[str] = []
        """Further services in whose place the server answers health checks."""
        self._draining = False
        self.admin_address = ""
        """The address to which ``admin_listen`` was bound; empty if there is none."""

    def add(
        self, servicer: Any, descriptor: ServiceDescriptor, callers: Callers | None = None, doors: Doors | None = None
    ) -> None:
        """Adds a service's methods, which are those of ``servicer``.

        ``callers`` names the roles of every method. ``doors``, by method name, check a call before its message is read.
        """
        methods = {method.name for method in descriptor.methods}
        if self._tls is not None or callers is not None:
            table = callers or {}
            if methods != set(table):
                raise ValueError(f"{descriptor.full_name} has {sorted(methods)}, but callers of {sorted(table)}")
            self._callers |= {f"/{descriptor.full_name}/{name}": roles for name, roles in table.items()}
        self._doors |= {f"/{descriptor.full_name}/{name}": look for name, look in (doors or {}).items()}
        self._serve(servicer, descriptor, descriptor.full_name)
        self._names.append(descriptor.full_name)

    def _serve(self, servicer: Any, descriptor: ServiceDescriptor, name: str, *, timed: bool = False) -> None:
        """Adds the methods, wrapped by the interceptors, as those of a service of this full name."""
        methods = [(each, getattr(servicer, each.name)) for each in descriptor.methods]
        made = {each.name: self._handler(own, each, name, timed) for each, own in methods}
        if isinstance(self._server, Http2Server):
            self._server.add(name, made)
        else:
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, made),))

    def _handler(self, own: Any, method: MethodDescriptor, service: str, timed: bool) -> Any:
        path = f"/{service}/{method.name}"
        behaviour = self._first_messages.behaviour(own, method, path, timed=timed)
        for around in reversed(self._interceptors):
            behaviour = around(behaviour, path)
        many = method.server_streaming
        make: Any = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler
        asked, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        return make(behaviour, parsing(asked.FromString), answer.SerializeToString)

    async def start(self, *, serving: bool = True) -> str:
        """Binds and serves; reports SERVING if ``serving``. Returns ``host:port``.

        Raises :class:`Unavailable` if the port is taken."""
        everyone = ANYBODY if self._admin_listen else MEMBERS
        for service in _COMMON:
            self._callers |= {f"/{service.full_name}/{method.name}": everyone for method in service.methods}
        self._serve(self._health, HEALTH, HEALTH.full_name)
        known = (*self._names, *[service.full_name for service in _COMMON])
        reflecting: Any = reflection.aio.ReflectionServicer(known)  # type: ignore[attr-defined]
        for service in REFLECTION:  # with the messages of the one that grpcio knows
            self._serve(reflecting, REFLECTION[-1], service.full_name, timed=True)
        address = self._bind(self._listen, ask_clients=not self._admin_listen)
        if self._admin_listen:
            self.admin_address = self._bind(self._admin_listen, ask_clients=True)
        await self._server.start()
        await self.set_serving(serving)
        return address

    def _bind(self, listen: str, *, ask_clients: bool) -> str:
        host, _ = parse_address(listen)
        try:
            if isinstance(self._server, Http2Server):
                port = self._server.listener.bind(listen)
            elif self._tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                credentials = self._tls.server_credentials(ask_clients=ask_clients)
                port = self._server.add_secure_port(listen, credentials)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"cannot listen on {listen}: the port is taken or not ours") from error
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def begin_drain(self) -> None:
        """Reports NOT_SERVING, while calls are still served."""
        if not self._draining:
            self._draining = True
            self._set_health(Status.NOT_SERVING)

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer to health checks, until the server drains."""
        if not self._draining:
            self._set_health(Status.SERVING if serving else Status.NOT_SERVING)

    async def drain(self, seconds: float) -> None:
        """Reports NOT_SERVING, lets calls finish for ``seconds``, then ends them."""
        await self.begin_drain()
        await self._server.stop(seconds)

    def _set_health(self, status: Any) -> None:
        self._health.say(("", *self._names, *self.stands_for), status)
