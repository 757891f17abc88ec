"""The whole suite as processes on this machine: for ``./dev up``, the demo and the tests.

Each child announces its endpoints on a pipe (so all ports may be 0) and gets SIGTERM from the kernel when this process
dies. Each lives in a session of its own, so Ctrl-C reaches only this process, which then stops the children in order.
The kernel sends that SIGTERM when the *thread* that started the child ends: call :meth:`LocalCluster.start` from a
thread that lives on."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2, health_pb2_grpc

from launch import vllm
from launch.access import SuiteAccess, role_of
from launch.ports import HeldPorts, Port, next_port
from launch.process import START_S, Launch, Process, Progress, ServiceProcess, await_ready, end_all, start_module
from launch.redis_server import NoRedis, RedisServer, find_redis
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.batching import BATCHING_POLICIES
from pinyon.batching.service_order import SERVICE_ORDERS
from pinyon.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from pinyon.core.policies import Registry
from pinyon.core.request import Role
from pinyon.core.served import parse_more_models
from pinyon.eviction import EVICTION_POLICIES
from pinyon.messages.enums import role_to_proto
from pinyon.placement.policies import PLACEMENT_POLICIES
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.runtime.eviction_choice import whole_choice
from pinyon.runtime.identity import REDIS, cluster_identities, hosts_of

STOP_S = 15.0
WORKERS = ("prefill", "decode", "mixed")
"""The kinds of workers."""

CHOSEN = {
    "conductor": ("placement",),
    "kvstore": ("eviction",),
    "worker": (
        *("engine", "engine_profile", "pool_blocks", "block_tokens", "dram_blocks"),
        *("batching", "attention_kernel", "service_order", "eviction"),
    ),
    "lb": ("api_keys_file", "routing", "more_models"),
}
"""The fields of a spec that are options of services, by kind of service; empty ones are left out."""

T = TypeVar("T")

POLICIES: dict[str, Registry[Any]] = {
    "placement": PLACEMENT_POLICIES,
    "routing": ROUTING_POLICIES,
    "batching": BATCHING_POLICIES,
    "service_order": SERVICE_ORDERS,
    "eviction": EVICTION_POLICIES,
}
"""The policies that can be chosen for a whole cluster, by the name of the field and of the services' option."""


def option(
    default: T, text: str, *, up: T | None = None, choices: Sequence[str] | None = None, metavar: str | None = None
) -> T:
    """Returns a field for which ``./dev up`` has an option; ``up`` is the option's default if it differs."""
    words = {"help": text, "default": default if up is None else up}
    if isinstance(default, bool):
        words["action"] = "store_true"
    else:
        words |= {"type": type(default), "choices": choices, "metavar": metavar}
    return field(default=default, metadata=words)


def options(spec: type) -> dict[str, Mapping[str, Any]]:
    """Returns the fields of a class of specs for which ``./dev up`` has an option, each with its argparse arguments."""
    return {each.name: each.metadata for each in fields(spec) if each.metadata}


def _policy(name: str) -> str:
    return option("", f"{name.replace('_', ' ')} policy: {POLICIES[name].described}")


@dataclass(frozen=True)
class ClusterSpec:
    """The services of a suite, their addresses and options. Port 0 means a free one, an empty policy the default."""

    prefix: str = ""
    """The prefix of all instance ids, for clusters that know each other."""
    region: str = ""
    """The region that the certificates of the load balancers name."""
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Additional arguments by kind of service: conductor, kvstore, worker, prefill, decode, mixed, lb."""
    prefill: int = option(2, "prefill workers (default 2)")
    decode: int = option(2, "decode workers (default 2)")
    mixed: int = option(0, "workers that do both (default 0)")
    stores: int = option(1, "KV store nodes; 0 serves without a store and without Redis (default 1)")
    lbs: int = option(1, "load balancers; further ones take the next free ports (default 1)")
    host: str = option("127.0.0.1", "address everything listens on (default 127.0.0.1)")
    http_port: int = option(0, "OpenAI-compatible HTTP (default 8000; 0: a free one)", up=8000)
    lb_port: int = option(0, "the load balancer's gRPC (default 8001; 0: a free one)", up=8001)
    conductor_port: int = option(0, "the conductor's gRPC (default 7000; 0: a free one)", up=7000)
    metrics_base_port: int = option(
        0,
        "Prometheus metrics: the first of as many ports in a row as there are services, each the same at every "
        "start (default 7300; 0: free ones)",
        up=7300,
        metavar="PORT",
    )
    """The first of the ports, in the order of :attr:`names`."""
    redis_url: str = option("", "a running Redis; default: redis-server from the PATH, else the embedded one")
    model: str = option("", "Hugging Face checkpoint folder; default: the small built-in model")
    served_model_name: str = option("", "name clients ask for; default: the model's own")
    more_models: str = option(
        "",
        "further models behind the same load balancer, each with that many workers of its own",
        metavar="[NAME=]FOLDER,...",
    )
    engine: str = option(
        "numpy",
        "instant computes nothing (for measuring); paced sleeps as long as the steps of --engine-profile take; vllm: "
        "each worker is a stock vLLM server with pinyon's connector, all of them mixed",
        choices=("numpy", "instant", "paced", "vllm"),
    )
    engine_profile: str = option("", "what a paced engine imitates: tiny, l4-llama-8b, a800x8-llama-70b, or a file")
    placement: str = _policy("placement")
    routing: str = _policy("routing")
    batching: str = _policy("batching")
    service_order: str = _policy("service_order")
    eviction: str = _policy("eviction")
    attention_kernel: str = option(
        "",
        "whose tokens read KV together in a step: nobody's, the whole batch's, any two's (default grouped)",
        choices=("plain", "whole", "grouped"),
    )
    pool_blocks: int = option(
        1280, "KV blocks per worker (default 1280: 40,960 tokens, the built-in model's longest context)"
    )
    dram_blocks: int = option(0, "KV blocks of a second tier per worker (default 0: none)")
    block_tokens: int = option(32, "tokens per KV block (default 32)")
    store_mib: int = option(256, "DRAM pool of each store node in MiB (default 256)")
    tls: bool = option(False, "TLS between all services, HTTPS for clients; the files are made for it")
    tls_dir: str = option("", "keep these files here; default: deleted at the end", metavar="DIR")
    allow_insecure: bool = option(False, "listen on --host without TLS or API keys though others reach it")
    api_keys_file: str = option("", "lines of KEY TENANT; default: no keys, one public tenant")
    otlp_endpoint: str = option("", "send traces there (http://host:4317)")
    journal: str = option("", "write what workers and load balancers decide, one file each", metavar="DIR")
    """The folder for the journals, created if missing."""
    log_level: str = option("info", "", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "", choices=("text", "json"))

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "mixed", "stores"):
            if not 0 <= getattr(self, name) <= 64:
                raise InvalidArgument(f"{name} must be 0 to 64", field=name)
        if self.prefill + self.mixed == 0 or self.decode + self.mixed == 0:
            raise InvalidArgument(
                "there must be workers that prefill and workers that decode: --prefill and --decode, or --mixed, of 1 "
                "or more",
                field="decode",
            )
        copies = 1 + len(self.models)
        if copies * (self.prefill + self.decode + self.mixed) > 192:
            raise InvalidArgument(f"{copies} models with that many workers each are too many", field="more_models")
        if not 1 <= self.lbs <= 16:
            raise InvalidArgument("lbs must be 1 to 16", field="lbs")
        if not 0 <= self.metrics_base_port <= 65_536 - len(self.names):
            raise InvalidArgument(
                f"there are no {len(self.names)} ports from {self.metrics_base_port} on", field="metrics_base_port"
            )
        if self.engine == "vllm" and self.more_models:
            raise InvalidArgument("with --engine vllm all workers serve one model", field="engine")
        for name, registry in POLICIES.items():
            if choice := getattr(self, name):
                try:
                    registry.checked(whole_choice(choice))
                except ValueError as error:
                    raise InvalidArgument(str(error), field=name) from None

    @property
    def counts(self) -> dict[str, int]:
        """The number of services of each kind but the conductor: workers, which each model has of its own, and stores.

        Stores come last, so that without Redis and stores the others keep their ports."""
        workers = {role: (1 + len(self.models)) * getattr(self, role) for role in WORKERS}
        return {"lb": self.lbs, **workers, "kvstore": self.stores}

    @property
    def instances(self) -> int:
        """The number of instances that register with the conductor."""
        return sum(self.counts.values()) - self.lbs

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all services."""
        return ("conductor", *(f"{kind}-{number}" for kind, count in self.counts.items() for number in range(count)))

    def metrics_port(self, name: str) -> int:
        """Returns the metrics port of the service ``name``; 0 means a free one."""
        return self.metrics_base_port and self.metrics_base_port + self.names.index(name)

    @property
    def ports(self) -> list[Port]:
        """The ports that options can choose, 0 if none was chosen. Others, such as the workers', are always free."""
        return [
            Port("OpenAI-compatible HTTP", "--http-port", self.host, self.http_port),
            Port("the load balancer's gRPC", "--lb-port", self.host, self.lb_port),
            Port("the conductor's gRPC", "--conductor-port", self.host, self.conductor_port),
            *(
                Port(f"the metrics of {self.prefix}{name}", "--metrics-base-port", self.host, self.metrics_port(name))
                for name in self.names
            ),
        ]

    @property
    def models(self) -> dict[str, str]:
        """The folders of the further models by name."""
        return parse_more_models(self.more_models)


class LocalCluster:
    """The suite as local processes: use it as a context manager, or call :meth:`stop` in any case."""

    controller: ServiceProcess | None = None
    """The process that several regions have in common; a suite by itself has none."""

    def __init__(self, spec: ClusterSpec, log_dir: Path | None = None, launch: Launch = start_module) -> None:
        self.spec = spec
        self._launch_one = launch
        self.services: dict[str, ServiceProcess] = {}
        self.redis: RedisServer | None = None
        self._owned = ExitStack()
        """Temporary folders and held ports, until the suite is stopped."""
        self._ports = self._owned.enter_context(HeldPorts())
        """Ports of services that others find by address only, if not chosen: a restart needs the same ones."""
        folders = {"log_dir": log_dir, "journal": spec.journal}
        self._folders = {option: Path(folder) for option, folder in folders.items() if folder}
        """The folders by option, created at the start only: a refused start leaves none behind."""
        for option, folder in self._folders.items():
            _check_folder(folder, option)
        self.log_dir = log_dir or self._temporary("logs")
        self.access = SuiteAccess()
        """The way to reach the services from outside."""

    def _temporary(self, what: str) -> Path:
        folder = tempfile.TemporaryDirectory(prefix=f"pinyon-{what}-", ignore_cleanup_errors=True)
        return Path(self._owned.enter_context(folder))

    @property
    def clusters(self) -> dict[str, LocalCluster]:
        """The suites by region, as several regions have them: this one, of none."""
        return {"": self}

    @property
    def ports(self) -> list[Port]:
        """The ports that options can choose, see :attr:`ClusterSpec.ports`."""
        return self.spec.ports

    # -- endpoints

    @property
    def http(self) -> str:
        """The base URL of the first load balancer, without a path."""
        return f"{'https' if self.spec.tls else 'http'}://{self.services['lb-0'].endpoints['http']}"

    @property
    def conductor(self) -> str:
        return self.services["conductor"].endpoints["grpc"]

    @property
    def processes(self) -> list[Process]:
        """Our processes, for a supervisor; a Redis that runs elsewhere is none of them."""
        redis = [] if self.redis is None or self.redis.process is None else [self.redis]
        return [*redis, *self.services.values()]

    def of_kind(self, kind: str) -> list[ServiceProcess]:
        """Returns the services whose name is ``kind`` or ``kind-N``."""
        return [service for name, service in self.services.items() if name.rpartition("-")[0] == kind or name == kind]

    # -- life

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, progress: Progress = lambda _: None) -> None:
        """Starts all services and waits until a request can be served; on any failure stops what was started."""
        try:
            self._start(progress)
        except BaseException:
            self.stop()
            raise

    def _start(self, progress: Progress) -> None:
        deadline = time.monotonic() + START_S + 3.0 * self.spec.instances
        if self.spec.engine == "vllm":
            deadline += vllm.START_S
        self.make_folders()
        self.make_certificates()
        if self.spec.stores:
            try:
                self.redis = find_redis(self.spec.redis_url, tls_dir=self.access.folder(REDIS, "redis"))
                progress(f"redis ({self.redis.origin}) at {self.redis.url}")
            except NoRedis as error:
                self.spec = replace(self.spec, stores=0)
                progress(f"no KV store: it needs a Redis. {error.message}; everything else starts without it")
        spec = self.spec
        self._launch([self._make("conductor", "conductor", port=self._port(spec.conductor_port))], deadline, progress)
        joins = ("--conductor", self.conductor)
        holds = ("--redis-url", self.redis.url if self.redis else "", "--transfer-listen", f"{spec.host}:0")
        served = [(spec.model, spec.served_model_name), *((folder, name) for name, folder in spec.models.items())]
        models = [("--model", folder, "--served-model-name", name) for folder, name in served]
        workers = [
            self._make_vllm(f"{role}-{number}", progress)
            if spec.engine == "vllm"
            else self._make(f"{role}-{number}", "worker", *joins, *holds, *model, "--role", role)
            for role in WORKERS
            for number, model in enumerate(each for each in models for _ in range(getattr(spec, role)))
        ]
        stores = [
            self._make(f"kvstore-{index}", "kvstore", *joins, *holds, "--pool-mib", str(spec.store_mib))
            for index in range(spec.stores)
        ]
        # No proxy in front of a load balancer asks whether it is ready, so it ends at once.
        fronts = (*joins, *models[0], "--lame-duck-s", "0", "--http-listen")
        lbs = [
            self._make(f"lb-{index}", "lb", *fronts, f"{spec.host}:{self._port(http)}", port=self._port(grpc))
            for index, (http, grpc) in enumerate(lb_ports(spec))
        ]
        self._launch([*stores, *workers, *lbs], deadline, progress)
        self.wait_serving(deadline)

    def _port(self, port: int) -> int:
        return port or self._ports.take(self.spec.host)

    def _make(self, name: str, kind: str, *own: str, port: int = 0) -> ServiceProcess:
        """Makes a service that is not started. Its last arguments count, so that those of the spec come last."""
        spec = self.spec
        folder = self.access.folder(role_of(name), spec.prefix + name)
        chosen = {option: value for option in CHOSEN[kind] if (value := str(getattr(spec, option)))}
        journal = Path(spec.journal).resolve() / f"{spec.prefix}{name}.jsonl"
        arguments = [
            *own,
            *(part for option, value in chosen.items() for part in (f"--{option.replace('_', '-')}", value)),
            *("--instance-id", spec.prefix + name, "--listen", f"{spec.host}:{port}"),
            *("--metrics-listen", f"{spec.host}:{spec.metrics_port(name)}"),
            *(() if folder is None else ("--tls-dir", str(folder))),
            *(("--allow-insecure",) if spec.allow_insecure else ()),
            *("--log-level", spec.log_level, "--log-format", spec.log_format, "--otlp-endpoint", spec.otlp_endpoint),
            *(("--journal", str(journal)) if spec.journal and kind in ("worker", "lb") else ()),
            *spec.extra.get(kind, ()),
            *(spec.extra.get(name.rpartition("-")[0], ()) if kind == "worker" else ()),
        ]
        log = self.log_dir / f"{name}.log"
        # The conductor learns the new port of an instance when it registers again.
        moves = kind in ("worker", "kvstore")
        service = ServiceProcess(name, f"services.{kind}", arguments, log, self._launch_one, moves=moves)
        self.services[name] = service
        return service

    def _make_vllm(self, name: str, progress: Progress) -> vllm.VllmServer:
        spec = self.spec
        folder = self.access.folder(role_of(name), spec.prefix + name)
        connector = {
            "conductor": self.conductor,
            "redis_url": self.redis.url if self.redis else "",
            "instance_id": spec.prefix + name,
            "role": name.partition("-")[0],
            "transfer_listen": f"{spec.host}:0",
            "listen": f"{spec.host}:0",
            "log_level": spec.log_level,
            **({} if folder is None else {"tls_dir": str(folder)}),
            **({"allow_insecure": True} if spec.allow_insecure else {}),
        }
        server = vllm.VllmServer(
            name, Path(spec.model), self.model_name, spec.host, self._port(0), connector, self.log_dir / f"{name}.log",
            spec.extra.get("vllm", ()), progress,
        )  # fmt: skip
        self.services[name] = server
        return server

    @property
    def model_name(self) -> str:
        """The name of the first model that clients ask for."""
        spec = self.spec
        return spec.served_model_name or (Path(spec.model).resolve().name if spec.model else "pinyon-tiny")

    def make_folders(self) -> None:
        """Creates the folders for logs and journals. Raises :class:`InvalidArgument` if one cannot be created."""
        for option, folder in self._folders.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidArgument(f"cannot make the folder {folder}: {error.strerror}", field=option) from None

    def make_certificates(self) -> None:
        """Creates missing certificates if TLS is on. Clusters that share a ``tls_dir`` do so before any starts."""
        spec = self.spec
        if not spec.tls or self.access.root is not None:
            return
        # Imported with TLS only, because it needs cryptography.
        from pinyon.runtime.certificates import Authority, Wanted

        root = Path(spec.tls_dir) if spec.tls_dir else self._temporary("tls")
        now = datetime.datetime.now(datetime.UTC)
        authority = Authority.open(root, now)
        prefill, decode, mixed = (spec.counts[role] for role in WORKERS)
        for identity in cluster_identities(prefill, decode, mixed, spec.stores, spec.lbs, spec.prefix):
            authority.issue(Wanted(identity, hosts_of(identity, (spec.host,), spec.region)), now)
        self.access = SuiteAccess(root, spec.prefix)

    def _launch(self, services: Sequence[ServiceProcess], deadline: float, progress: Progress) -> None:
        for service in services:
            service.spawn()
        await_ready(services, deadline, lambda service: progress(f"{service.name} {service.addresses}"))

    def wait_serving(self, deadline: float) -> None:
        """Waits until all are healthy, the conductor knows every instance and each load balancer would serve."""
        for service in self.services.values():
            if service in self.of_kind("lb") or isinstance(service, vllm.VllmServer):
                continue  # a load balancer is healthy only when it would serve; vLLM was asked already
            with self.access.channel(service) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                reply = stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=max(0.1, deadline - time.monotonic()), wait_for_ready=True
                )
                if reply.status != health_pb2.HealthCheckResponse.SERVING:
                    raise Unavailable(f"{service.name} is not serving")
        self.wait_instances(self.spec.instances, deadline)
        for service in self.of_kind("lb"):
            self._wait_lb(service, deadline)

    def wait_instances(self, count: int, deadline: float) -> list[conductor_pb2.Instance]:
        """Waits until the conductor lists ``count`` schedulable instances (store nodes count too); returns them."""
        with self.access.channel(self.services["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorServiceStub(channel)
            while True:
                left = deadline - time.monotonic()
                reply = stub.ListInstances(
                    conductor_pb2.ListInstancesRequest(), timeout=max(0.1, left), wait_for_ready=True
                )
                ready = [
                    instance
                    for instance in reply.instances
                    if instance.schedulable or instance.info.role == role_to_proto(Role.STORE)
                ]
                if len(ready) == count:
                    return ready
                if left <= 0:
                    names = ", ".join(sorted(instance.info.instance_id for instance in ready))
                    raise DeadlineExceeded(f"the conductor knows {len(ready)} of {count} instances: {names}")
                time.sleep(0.02)  # a poll with a deadline: membership has no event for outsiders

    def _wait_lb(self, service: ServiceProcess, deadline: float) -> None:
        while True:
            if not service.alive:
                raise Unavailable(f"{service.name} ended{service.log_tail()}")
            with suppress(OSError), closing(self.access.http(service, timeout_s=2)) as connection:
                connection.request("GET", "/health/ready")
                if connection.getresponse().status == 200:
                    return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{service.name} does not become ready")
            time.sleep(0.02)  # a poll with a deadline, as above

    def stop(self) -> None:
        """Ends all services, outermost first; kills those that do not end in time."""
        for kinds in (("lb",), WORKERS, ("kvstore",), ("conductor",)):
            end_all([service for kind in kinds for service in self.of_kind(kind)], STOP_S)
        if self.redis is not None:
            self.redis.close()
            self.redis = None
        self._owned.close()


def _check_folder(folder: Path, field: str) -> None:
    """Raises :class:`InvalidArgument` if the folder cannot be created or cannot be written into."""
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        usable = there.is_dir()
    except OSError as error:
        raise InvalidArgument(f"cannot make the folder {folder}: {error.strerror}", field=field) from None
    if not usable:
        raise InvalidArgument(f"cannot make the folder {folder}: {there} is no folder", field=field)
    if not os.access(there, os.W_OK | os.X_OK):
        raise InvalidArgument(f"cannot write into the folder {there}", field=field)


def lb_ports(spec: ClusterSpec) -> list[tuple[int, int]]:
    """Returns the HTTP and gRPC port of each load balancer.

    The first has the ports of the spec, the others the next ports that neither the suite nor this machine uses now.
    Raises :class:`InvalidArgument` if there are none."""
    taken = {port.port for port in spec.ports}
    ports = [(spec.http_port, spec.lb_port)]
    for _ in range(1, spec.lbs):
        http_port, lb_port = (next_port(spec.host, port, taken) for port in ports[-1])
        ports.append((http_port, lb_port))
    return ports
