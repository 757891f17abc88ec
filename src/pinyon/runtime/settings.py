"""One frozen, validated settings object per service; an unknown key is an error.

A field ``pool_mib`` of the worker is ``--pool-mib`` on the command line and ``PINYON_WORKER_POOL_MIB`` in the
environment; the command line wins.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pinyon.core.address import is_loopback, parse_address
from pinyon.core.compiled import version_line
from pinyon.core.errors import InvalidArgument, PinyonError
from pinyon.core.near import did_you_mean
from pinyon.runtime.arguments import Parser, module_as_typed
from pinyon.runtime.identity import ANY

FILE_BYTES_MAX = 4 << 20
"""The limit of a JSON file that a setting names."""

T = TypeVar("T")
Settings = TypeVar("Settings", bound="ServiceSettings")


def service_config(service: str) -> SettingsConfigDict:
    """Returns the ``model_config`` of a service's settings: environment prefix, frozen, no unknown fields."""
    return SettingsConfigDict(
        env_prefix=f"PINYON_{service.upper()}_", frozen=True, extra="forbid", title=f"pinyon {service}"
    )


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


class ServiceSettings(BaseSettings):
    """The settings of all services."""

    model_config = service_config("service")

    instance_id: str = Field("", max_length=64, description="unique name; made up when empty")
    listen: Address = Field("127.0.0.1:0", description="host:port of the gRPC server; port 0 takes a free one")
    advertise_host: str = Field("", description="host that others reach this process at; default: the host of --listen")
    metrics_listen: Address = Field(
        "127.0.0.1:0", description="host:port of the Prometheus endpoint; empty turns it off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="one line per record: for people, or JSON")
    otlp_endpoint: str = Field(
        "", description="OTLP/gRPC endpoint for traces (http://host:4317); empty turns tracing off"
    )
    ready_fd: WritableFd = Field(-1, description="file descriptor to announce the bound endpoints on, as one JSON line")
    drain_s: float = Field(10.0, ge=0, le=3600, description="seconds that requests in flight get on shutdown")

    tls_dir: str = Field("", description="folder made by `pinyon certs`, in place of the four files that follow")
    tls_cert: str = Field("", description="this process's certificate (PEM), which names its role and instance id")
    tls_key: str = Field("", description="private key of the certificate")
    tls_ca: str = Field("", description="authority that peers' certificates must be signed by")
    cluster_secret_file: str = Field(
        "", description="file with the secret that block keys start from and transfer engines prove to each other"
    )
    allow_insecure: bool = Field(
        False, description="listen beyond loopback without TLS (the load balancer: or without API keys) all the same"
    )

    @model_validator(mode="before")
    @classmethod
    def _files_of_the_folder(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("tls_dir"):
            folder = Path(values["tls_dir"])
            values = {**{name: str(folder / file) for name, file in TLS_FILES.items()}, **values}
        return values

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
    parts = urlsplit(url)
    if not settings.has_tls or parts.scheme != "redis" or is_loopback(parts.hostname or "localhost"):
        return []
    return [f"--redis-url {parts.scheme}://{parts.hostname} is without TLS: rediss:// has it"]


def load_settings(
    cls: type[Settings], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Loads settings from command line and environment; ends with a message and exit status 2 on bad input."""
    environ = os.environ if environ is None else environ
    prefix = str(cls.model_config.get("env_prefix", ""))
    title = str(cls.model_config.get("title", "pinyon"))
    parser = Parser(
        prog=module_as_typed(f"services.{title.removeprefix('pinyon ')}"),
        description=(cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else None,
        epilog=f"Every option can also be set as {prefix}NAME in the environment.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version_line())
    for name, field in cls.model_fields.items():
        default = field.get_default(call_default_factory=False)
        shown = "" if default in ("", None, False) else f" (default: {default})"
        flag: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            default=None,
            metavar="VALUE",
            **flag,
            help=((field.description or "") + shown).replace("%", "%%"),
        )
        if default is True:
            parser.add_argument(f"--no-{name.replace('_', '-')}", dest=name, action="store_const", const="false")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}

    def refuse(message: str) -> NoReturn:
        sys.stderr.write(f"{title}: {message}\n")
        raise SystemExit(2)

    values: dict[str, Any] = {}
    known = {prefix + name.upper(): name for name in cls.model_fields}
    for key, value in environ.items():
        if not key.startswith(prefix):
            continue
        if key not in known:
            refuse(
                f"unknown setting {key} in the environment{did_you_mean(key, known)}; known: {', '.join(sorted(known))}"
            )
        values[known[key]] = value
    values.update(given)
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what, got = first["msg"].removeprefix("Value error, "), repr(first.get("input"))
        if first["type"] == "literal_error":
            got += did_you_mean(str(first["input"]), get_args(cls.model_fields[where].annotation))
        if not where:
            refuse(what)
        refuse(f"--{where.replace('_', '-')}: {what}" + ("" if got in what else f", got {got}"))


def read_json(path: str, field: str, parse: Callable[[Any], T], nothing: T) -> T:
    """Returns what ``parse`` makes of the file, or ``nothing`` if no path is given.

    Raises :class:`InvalidArgument`, with the setting's name as its ``field``, if the file cannot be used."""
    if not path:
        return nothing
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise InvalidArgument(f"there are more than {FILE_BYTES_MAX >> 20} MiB", field=field)
        return parse(json.loads(data))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field=field) from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no JSON: {error}", field=field) from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}", field=field) from None
