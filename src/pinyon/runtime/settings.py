"""One frozen, validated settings object per service; :mod:`pinyon.runtime.setting_sources` loads it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pinyon.core.address import is_loopback, parse_address
from pinyon.core.errors import InvalidArgument, PinyonError
from pinyon.runtime.files import read_file
from pinyon.runtime.identity import ANY
from pinyon.runtime.redis_url import parse_redis_url

FILE_BYTES_MAX = 4 << 20
"""The limit of a JSON file that a setting names."""

T = TypeVar("T")


def service_config(service: str) -> ConfigDict:
    """Returns the ``model_config`` of a service's settings: its title, frozen, no unknown fields."""
    return ConfigDict(title=f"pinyon {service}", frozen=True, extra="forbid", validate_default=True)


def setting(default: Any, text: str, **limits: Any) -> Any:
    """Returns a field with its default and its help ``text``; ``limits`` are pydantic's, such as ``ge``."""
    return Field(default, description=text, **limits)


def checked(parse: Callable[[str], object], *, empty: bool = True) -> AfterValidator:
    """Returns a validator for a text field: ``parse`` raises :class:`InvalidArgument` or ``ValueError`` for a bad text.

    The field's value stays the text. If ``empty``, an empty text is valid too, and is not parsed."""
    return AfterValidator(partial(_checked, parse, empty))


def _checked(parse: Callable[[str], object], empty: bool, text: str) -> str:
    try:
        if text or not empty:
            parse(text)
    except InvalidArgument as error:
        raise ValueError(error.message) from None
    return text


Address = Annotated[str, checked(parse_address)]
"""A settings field that is ``host:port``, or empty."""


def _writable(fd: int) -> int:
    if fd >= 0:
        try:
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        except (OSError, OverflowError):
            raise ValueError(f"{fd} is no open file descriptor: whoever starts this process hands it over") from None
        if mode == os.O_RDONLY:
            raise ValueError(f"file descriptor {fd} is open for reading only")
    return fd


WritableFd = Annotated[int, AfterValidator(_writable)]
"""A settings field that is an inherited file descriptor to write to; negative: none."""


TLS_FILES = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt", "cluster_secret_file": "cluster.secret"}
"""The name of each file in a folder of ``pinyon certs``, by the setting that names the file."""


def with_tls_files(values: dict[str, Any]) -> dict[str, Any]:
    """Returns settings with the files of their ``tls_dir``, but for those that they name themselves."""
    folder = values.get("tls_dir")
    if not folder or not isinstance(folder, str):
        return values
    return {name: str(Path(folder) / file) for name, file in TLS_FILES.items()} | values


class ServiceSettings(BaseModel):
    """The settings of all services.

    ``everyday`` has the names of those that ``--help`` shows, by the titles of their groups, and ``further`` of those
    that only ``--help-all`` shows. A class lists each
    field that it adds in one of them."""

    model_config = service_config("service")
    everyday: ClassVar[dict[str, str]] = {
        "addresses": "listen metrics_listen",
        "security": "tls_dir allow_insecure",
        "log": "log_level log_format",
    }
    further: ClassVar[dict[str, str]] = {
        "addresses": "advertise_host",
        "security": "tls_cert tls_key tls_ca cluster_secret_file",
        "log": "otlp_endpoint",
        "start and end": "instance_id ready_fd drain_s",
    }

    instance_id: str = setting("", "unique name of this process; made up when empty", max_length=64)
    listen: Address = setting("127.0.0.1:0", "host:port of the gRPC server; port 0 takes a free one")
    advertise_host: str = setting("", "host at which others reach this process; default: the host of --listen")
    metrics_listen: Address = setting("127.0.0.1:0", "host:port of the Prometheus endpoint; empty turns it off")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "lowest level that is logged")
    log_format: Literal["text", "json"] = setting("text", "one line per record: text for people, or JSON")
    otlp_endpoint: str = setting("", "OTLP/gRPC endpoint for traces (http://host:4317); empty turns tracing off")
    ready_fd: WritableFd = setting(-1, "file descriptor on which to announce the bound endpoints, as one JSON line")
    drain_s: float = setting(10.0, "time that requests in flight get to finish on shutdown", ge=0, le=3600)

    tls_dir: str = setting("", "folder made by `pinyon certs`: certificate, key, authority and secret")
    tls_cert: str = setting("", "this process's certificate (PEM), which names its role and instance id")
    tls_key: str = setting("", "private key of the certificate")
    tls_ca: str = setting("", "authority that must have signed peers' certificates")
    cluster_secret_file: str = setting("", "file with the cluster secret, for block keys and between transfer engines")
    allow_insecure: bool = setting(
        False, "allow listening beyond loopback without TLS (for a load balancer: or without API keys)"
    )

    @classmethod
    def service(cls) -> str:
        """Returns the name of the service."""
        return str(cls.model_config.get("title", "pinyon")).removeprefix("pinyon ")

    @classmethod
    def certified_role(cls) -> str:
        """Returns the role that the process's certificate names (:mod:`pinyon.runtime.identity`)."""
        return cls.service()

    @classmethod
    def env_prefix(cls) -> str:
        """Returns what the names of this service's variables begin with."""
        return f"PINYON_{cls.service().upper()}_"

    @classmethod
    def everyday_fields(cls) -> set[str]:
        """Returns the names of the fields that ``--help`` shows."""
        return {
            name for each in cls.__mro__ for names in vars(each).get("everyday", {}).values() for name in names.split()
        }

    @classmethod
    def grouped_fields(cls) -> dict[str, list[str]]:
        """Returns the names of all fields by the titles of their groups: this class's first, then its bases'."""
        groups: dict[str, list[str]] = {}
        for table in ("everyday", "further"):
            for each in cls.__mro__:
                for title, names in vars(each).get(table, {}).items():
                    groups.setdefault(title, []).extend(names.split())
        grouped = {name for names in groups.values() for name in names}
        if others := [name for name in cls.model_fields if name not in grouped]:
            groups["others"] = others
        return groups

    @model_validator(mode="before")
    @classmethod
    def _files_of_the_folder(cls, values: Any) -> Any:
        return with_tls_files(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _exposed(self) -> ServiceSettings:
        files = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(files) and not all(files):
            raise ValueError("TLS needs all three: --tls-cert, --tls-key and --tls-ca (or --tls-dir)")
        if not self.allow_insecure and (exposed := self.exposed()):
            raise ValueError(f"{exposed[0]}; --allow-insecure does so all the same")
        return self

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_cert)

    @property
    def tls_paths(self) -> tuple[Path, Path, Path]:
        """The paths of certificate, key and authority."""
        return Path(self.tls_cert), Path(self.tls_key), Path(self.tls_ca)

    def in_words(self, error: PinyonError, role: str) -> str:
        """Returns the message of a start-up error of a process of that role, with the option that it is about."""
        name = error.field if isinstance(error, InvalidArgument) else ""
        if not name:
            return error.message
        file = TLS_FILES.get(name)
        if self.tls_dir and file and Path(getattr(self, name)) == Path(self.tls_dir) / file:
            made = f"{role}/{self.instance_id or ANY}"
            return f"--tls-dir: {error.message}; `pinyon certs DIR {made}` makes the files, in DIR/{made}"
        return f"--{name.replace('_', '-')}: {error.message}"

    def listeners(self) -> dict[str, str]:
        """Returns the addresses that the process listens on, by their settings' names."""
        return {"listen": self.listen, "metrics_listen": self.metrics_listen}

    def exposed(self) -> list[str]:
        """Returns, in words, what strangers with a network path could reach unhindered; empty if all is well."""
        if self.has_tls:
            return []
        return [
            f"--{name.replace('_', '-')} {address} is not loopback: others would get in without TLS "
            "(--tls-dir; `pinyon certs` makes the files)"
            for name, address in self.listeners().items()
            if address and not is_loopback(parse_address(address)[0])
        ]

    def reachable(self, bound: str) -> str:
        """Returns the address that others should use for a server bound at ``bound``."""
        if not self.advertise_host:
            return bound
        return f"{self.advertise_host}:{parse_address(bound)[1]}"


def plain_redis(settings: ServiceSettings, url: str) -> list[str]:
    """Returns a warning if a process that has TLS would speak without it to a Redis elsewhere; else an empty list."""
    if not url or not settings.has_tls:
        return []
    parsed = parse_redis_url(url)
    elsewhere = [host for host, _ in parsed.hosts if not is_loopback(host)]
    if parsed.tls or not elsewhere:
        return []
    return [f"--redis-url {url.partition('://')[0]}://{elsewhere[0]} is without TLS: rediss:// has it"]


def read_json(path: str, field: str, parse: Callable[[Any], T], nothing: T) -> T:
    """Returns what ``parse`` makes of the file, or ``nothing`` if no path is given.

    Raises :class:`InvalidArgument`, with the setting's name as its ``field``, if the file cannot be used."""
    if not path:
        return nothing
    content = read_file(path, FILE_BYTES_MAX, field)
    try:
        return parse(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no JSON: {error}", field=field) from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}", field=field) from None
