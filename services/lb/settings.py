"""The settings of the load balancer."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from pinyon.core.address import is_loopback, parse_address
from pinyon.core.request import check_geography
from pinyon.core.served import parse_more_models
from pinyon.federation.distances import parse_position
from pinyon.frontdoor.cors import Cors
from pinyon.frontdoor.regions.peer import parse_peers
from pinyon.frontdoor.upstreams.url import parse_upstreams
from pinyon.http.budget import HttpLimits
from pinyon.http.peers import TrustedProxies
from pinyon.routing.policies import ROUTING_POLICIES
from pinyon.routing.pushing import PUSHING_RULES
from pinyon.runtime.distance import parse_delays
from pinyon.runtime.journal_file import JournalSettings
from pinyon.runtime.settings import Address, WritableFd, checked, service_config, setting

_OF_OWN = {
    "conductor": "requests go to servers without a conductor",
    "conductor_timeout_s": "there is no conductor",
    "instances_grace_s": "there is no conductor",
    "model": "servers bring their models, and say which they are",
    "served_model_name": "models have the names that servers give them",
    "more_models": "servers bring their models, and say which they are",
    "place_by": "there is no conductor",
    "chars_per_token_max": "nothing is tokenized here",
    "unread_tokens": "a server is read no faster than its client reads",
}
"""Settings for instances of pinyon, and the reasons why they mean nothing in front of other servers."""


_OF_SERVERS = frozenset(
    f"upstream_{name}"
    for name in ("api_key_file", "ca_file", "connections", "connect_s", "keep_alive_s", "first_byte_s", "stall_s")
)
"""Settings for other servers that are for those of instances too."""


def _checked_pushing(choice: str) -> str:
    return choice if choice == "auto" else PUSHING_RULES.checked(choice)


class LbSettings(JournalSettings):
    """The front door: OpenAI-compatible HTTP and gRPC, queue, placement, streams to the workers."""

    model_config = service_config("lb")
    everyday: ClassVar[dict[str, str]] = {
        "the suite": "http_listen conductor upstream region controller",
        "models": "model served_model_name",
        "clients": "api_keys_file tenant_rpm tenant_tpm cors_origins",
        "requests": "queue_limit request_timeout_s routing",
    }
    further: ClassVar[dict[str, str]] = {
        "the suite": "processes admin_listen peers http_url position geography_file",
        "models": "more_models chat_max_tokens chars_per_token_max",
        "clients": "trusted_proxies forwarded_field proxy_protocol connections_limit connections_per_peer "
        "requests_per_peer access_log",
        "requests": "in_flight_limit conductor_timeout_s place_by pushing placement_wait_s attempts instances_grace_s "
        "unread_tokens",
        "other servers (--upstream)": "upstream_api_key_file upstream_ca_file upstream_capacity upstream_connections "
        "upstream_connect_s upstream_keep_alive_s upstream_first_byte_s upstream_stall_s upstream_health_s "
        "upstream_health_timeout_s upstream_probe_s",
        "limits of HTTP": "body_limit_bytes bodies_limit_mib head_limit_bytes head_fields_limit line_limit_bytes "
        "head_timeout_s body_timeout_s keep_alive_s write_stall_s",
        "HTTPS": "http_tls_cert http_tls_key",
        "start and end": "lame_duck_s",
        "set by the program that starts several": "http_reuse_port heartbeat_fd upstream_sharers test_region_delays_ms",
    }

    conductor: Address = setting("", "host:port of the conductor")
    http_listen: Address = setting("127.0.0.1:0", "host:port of the HTTP server; port 0 takes a free one")
    processes: int = setting(
        1, "load balancer processes on this host that share one --http-listen (docs/use/deploy.md)", ge=1, le=256
    )
    http_reuse_port: bool = setting(
        False, "lets others listen at --http-listen too (SO_REUSEPORT); --processes sets it"
    )
    heartbeat_fd: WritableFd = setting(
        -1, "file descriptor that is written to twice a second while the event loop runs; --processes sets it"
    )
    admin_listen: Address = setting(
        "127.0.0.1:0", "host:port of the gRPC server for callers with a certificate; with TLS only"
    )
    http_tls_cert: str = setting("", "certificate for HTTPS, if its clients trust another authority than the cluster's")
    http_tls_key: str = setting("", "private key of that certificate")
    model: str = setting("", "Hugging Face checkpoint folder; empty: the built-in model")
    served_model_name: str = setting("", "clients' name for the model; default: its own name", max_length=128)
    more_models: Annotated[str, checked(parse_more_models)] = setting(
        "", "further models: [NAME=]FOLDER, with commas; a request without a model name is for --model"
    )
    api_keys_file: str = setting(
        "",
        'file with API keys: JSON {"KEY": "TENANT"} or lines "KEY TENANT" (docs/use/http-api.md); empty: '
        "no key is needed",
    )

    tenant_rpm: int = setting(
        0, "requests per minute of a tenant whose API key sets no limit; 0: no limit", ge=0, le=1 << 30
    )
    tenant_tpm: int = setting(
        0, "tokens per minute, prompts included, of a tenant whose API key sets no limit; 0: none", ge=0, le=1 << 40
    )
    queue_limit: int = setting(1024, "requests that may wait for their turn; more get 429", ge=0, le=1 << 20)
    in_flight_limit: int = setting(4096, "requests that run at once; more wait in the queue", ge=1, le=1 << 20)
    request_timeout_s: float = setting(600.0, "time limit of a whole request; then 504", gt=0, le=86_400)
    conductor_timeout_s: float = setting(
        0.5, "time to wait for the conductor's placement; then the load balancer chooses by itself", gt=0, le=60
    )
    routing: Annotated[str, AfterValidator(ROUTING_POLICIES.checked)] = setting(
        "skywalker", f"routing without a conductor: {ROUTING_POLICIES.choices}"
    )
    place_by: Literal["conductor", "routing"] = setting(
        "conductor",
        "who chooses instances: the conductor, or always --routing; the conductor lists them in either case",
    )
    pushing: Annotated[str, AfterValidator(_checked_pushing)] = setting(
        "auto",
        f"when to leave the queue: {PUSHING_RULES.choices}; auto: pending with regions or --upstream, else blind",
    )
    region: Annotated[str, checked(partial(check_geography, field="region"))] = setting(
        "", "name of this load balancer's region; needed to forward requests to or from other regions"
    )
    peers: Annotated[str, checked(parse_peers)] = setting(
        "",
        "load balancers of other regions: REGION=HOST:PORT of their gRPC server (with TLS: their "
        "--admin-listen), with commas",
    )
    controller: Address = setting(
        "", "host:port of the regional controller, which tells the other load balancers' addresses"
    )
    position: Annotated[str, checked(parse_position)] = setting(
        "", "position of the region: LATITUDE,LONGITUDE in degrees; for the choice of who takes over whom"
    )
    http_url: str = setting("", "base URL at which clients reach it, for the controller's list", max_length=512)
    geography_file: str = setting(
        "", "JSON that says which region may send to which, and where tenants may be served (docs/use/regions.md)"
    )
    test_region_delays_ms: Annotated[str, checked(parse_delays)] = setting(
        "", "for tests on one machine: REGION=MILLISECONDS, with commas; delay of messages to that region"
    )
    upstream: Annotated[str, checked(parse_upstreams)] = setting(
        "",
        "instead of a conductor: OpenAI-compatible servers (vLLM, SGLang ...), http://HOST:PORT[/PREFIX] "
        "or https://, with commas",
    )
    upstream_api_key_file: str = setting(
        "", "file with the servers' API keys: one line KEY for all servers, or lines URL KEY"
    )
    upstream_ca_file: str = setting(
        "", "authority that signs the certificates of https:// servers; empty: the system's authorities"
    )
    upstream_capacity: int = setting(
        0, "requests in a server's batch; 0: as the server says, or else as learned", ge=0, le=1 << 20
    )
    upstream_sharers: int = setting(
        1, "load balancers that share the servers; each takes its part of their room; --processes sets it", ge=1, le=256
    )
    upstream_connections: int = setting(4096, "most connections to one server", ge=1, le=1 << 16)
    upstream_connect_s: float = setting(2.0, "time to make a connection to a server", gt=0, le=60)
    upstream_keep_alive_s: float = setting(
        4.0, "idle time after which a connection is closed; shorter than the server's (uvicorn's: 5 s)", gt=0, le=3600
    )
    upstream_first_byte_s: float = setting(
        120.0, "time limit for a server's stream to begin; then another server is tried", gt=0, le=86_400
    )
    upstream_stall_s: float = setting(
        120.0, "longest time between two pieces of an answer before it counts as broken off", gt=0, le=86_400
    )
    upstream_health_s: float = setting(1.0, "time between two health checks of a server", ge=0.05, le=60)
    upstream_health_timeout_s: float = setting(
        2.0, "time in which a server must answer a health check; after two misses, it is not well", gt=0, le=60
    )
    upstream_probe_s: float = setting(0.1, "least time between two questions for a server's load", ge=0.01, le=10)

    instances_grace_s: float = setting(
        10.0, "time in which a conductor that has just started must list the instances known before", gt=0, le=3600
    )
    placement_wait_s: float = setting(10.0, "time to wait for an instance when there is none; then 503", gt=0, le=600)
    attempts: int = setting(
        3, "instances that a request may use up: they die during it, or fail it slowly; then 503", ge=1, le=10
    )

    access_log: bool = setting(True, "log one line at info for each finished request")
    lame_duck_s: float = setting(
        2.0, "time after SIGTERM in which /health/ready says 503 but requests are still taken", ge=0, le=600
    )

    trusted_proxies: Annotated[str, checked(TrustedProxies)] = setting(
        "", "networks of proxies (10.0.0.0/8, ::1) whose word on the client's address is believed"
    )
    forwarded_field: Literal["x-forwarded-for", "forwarded"] = setting(
        "x-forwarded-for", "the one header in which trusted proxies give the client's address"
    )
    proxy_protocol: bool = setting(
        False, "connections of trusted proxies begin with a PROXY protocol header (not together with TLS)"
    )
    connections_limit: int = setting(4096, "HTTP connections at once; more get 503", ge=1, le=1 << 16)
    connections_per_peer: int = setting(
        2048, "HTTP connections from one address (IPv6: one /64), trusted proxies aside; more get 503", ge=1, le=1 << 16
    )
    requests_per_peer: int = setting(
        2048, "requests at once from one client address that a trusted proxy names; more get 429", ge=1, le=1 << 16
    )

    cors_origins: Annotated[str, checked(Cors)] = setting(
        "", "origins of web pages that may send requests, such as https://a.example, with commas, or *; empty: none"
    )

    body_limit_bytes: int = setting(4 << 20, "largest HTTP body; more gets 413", ge=1024, le=64 << 20)
    bodies_limit_mib: int = setting(
        512,
        "total size of HTTP bodies, half of it for one tenant; more get 503. As much again for other regions' requests",
        ge=1,
        le=1 << 20,
    )
    head_limit_bytes: int = setting(32 << 10, "largest HTTP head; more gets 431", ge=1024, le=1 << 20)
    head_fields_limit: int = setting(100, "header fields of a request; more get 431", ge=1, le=1000)
    line_limit_bytes: int = setting(8 << 10, "longest HTTP request line; more gets 414", ge=256, le=1 << 16)
    head_timeout_s: float = setting(10.0, "time for a request's head to arrive; then 408", gt=0, le=600)
    body_timeout_s: float = setting(30.0, "time for a request to arrive whole; then 408", gt=0, le=600)
    keep_alive_s: float = setting(75.0, "idle time after which a connection is closed", gt=0, le=3600)
    write_stall_s: float = setting(30.0, "time after which a client that reads nothing is cut off", gt=0, le=3600)
    unread_tokens: int = setting(
        16_384, "tokens buffered for a client that reads slowly; with more it is cut off", ge=1, le=1 << 20
    )

    chat_max_tokens: int = setting(
        256, "tokens of a chat answer when the client sets no limit (fewer if the context is full)", ge=1, le=1 << 20
    )
    chars_per_token_max: int = setting(
        64, "characters per token of the context; longer text is refused without tokenizing it", ge=1, le=4096
    )

    def http_limits(self) -> HttpLimits:
        return HttpLimits(
            line_bytes=self.line_limit_bytes,
            head_bytes=self.head_limit_bytes,
            head_fields=self.head_fields_limit,
            body_bytes=self.body_limit_bytes,
            head_s=self.head_timeout_s,
            arrival_s=self.body_timeout_s,
            idle_s=self.keep_alive_s,
            write_stall_s=self.write_stall_s,
            connections=self.connections_limit,
        )

    @model_validator(mode="after")
    def _https_files(self) -> LbSettings:
        if bool(self.http_tls_cert) != bool(self.http_tls_key):
            raise ValueError("HTTPS needs both: --http-tls-cert and --http-tls-key")
        return self

    @model_validator(mode="after")
    def _one_kind(self) -> LbSettings:
        """Raises :class:`ValueError` if settings for instances of pinyon and for other servers are combined."""
        for name in sorted(self.model_fields_set):
            if name.startswith("upstream_") and name not in _OF_SERVERS and not self.upstream:
                raise ValueError(f"--{name.replace('_', '-')} is of use with --upstream only")
            if name in _OF_OWN and self.upstream and getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} does not go with --upstream: {_OF_OWN[name]}")
        if self.upstream_ca_file and self.upstream and not any(url.tls for url in parse_upstreams(self.upstream)):
            raise ValueError("--upstream-ca-file is for https:// servers, and --upstream names none")
        return self

    @model_validator(mode="after")
    def _of_a_region(self) -> LbSettings:
        if not self.region and (self.peers or self.controller or self.geography_file):
            raise ValueError("--peers, --controller and --geography-file need a name for this region: --region")
        if self.peers and self.controller:
            raise ValueError("the controller says who the others are: --peers and --controller exclude each other")
        return self

    @property
    def pushing_choice(self) -> str:
        """The pushing rule, with ``auto`` resolved."""
        if self.pushing != "auto":
            return self.pushing
        return "pending" if self.peers or self.controller or self.upstream else "blind"

    def listeners(self) -> dict[str, str]:
        http = {} if self.http_tls_cert else {"http_listen": self.http_listen}
        return {**super().listeners(), **http}

    def exposed(self) -> list[str]:
        if self.api_keys_file:
            return super().exposed()
        return super().exposed() + [
            f"--{name.replace('_', '-')} {address} is not loopback: everybody would be served without --api-keys-file"
            for name, address in (("http_listen", self.http_listen), ("listen", self.listen))
            if address and not is_loopback(parse_address(address)[0])
        ]
