"""One frozen, validated settings object per service; an unknown key is an error.

A field ``pool_mib`` of the worker is ``--pool-mib`` on the command line and ``PINYON_WORKER_POOL_MIB`` in the
environment; the command line wins.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from pinyon import __version__
from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument

__all__ = ["Address", "ServiceSettings", "load_settings", "service_config"]

Settings = TypeVar("Settings", bound="ServiceSettings")


def service_config(service: str) -> SettingsConfigDict:
    """``model_config`` of a service's settings: environment prefix, frozen, nothing unknown."""
    return SettingsConfigDict(
        env_prefix=f"PINYON_{service.upper()}_", frozen=True, extra="forbid", title=f"pinyon {service}"
    )


def _checked(address: str) -> str:
    if address:
        try:
            parse_address(address)
        except InvalidArgument as error:
            raise ValueError(error.message) from None
    return address


Address = Annotated[str, AfterValidator(_checked)]
"""A settings field that is ``host:port``, or empty."""


class ServiceSettings(BaseSettings):
    """What all services can be told."""

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
    ready_fd: int = Field(-1, description="file descriptor to announce the bound endpoints on, as one JSON line")
    drain_s: float = Field(10.0, ge=0, le=3600, description="seconds that requests in flight get on shutdown")

    def reachable(self, bound: str) -> str:
        """The address others should use for a server bound at ``bound``."""
        if not self.advertise_host:
            return bound
        return f"{self.advertise_host}:{parse_address(bound)[1]}"


def load_settings(
    cls: type[Settings], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from the command line and the environment; on bad input, a message on stderr and exit status 2."""
    environ = os.environ if environ is None else environ
    prefix = str(cls.model_config.get("env_prefix", ""))
    title = str(cls.model_config.get("title", "pinyon"))
    parser = argparse.ArgumentParser(
        prog=title,
        description=(cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else None,
        epilog=f"Every option can also be set as {prefix}NAME in the environment.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pinyon {__version__}")
    for name, field in cls.model_fields.items():
        default = field.get_default(call_default_factory=False)
        shown = "" if default in ("", None) else f" (default: {default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            default=None,
            metavar="VALUE",
            help=((field.description or "") + shown).replace("%", "%%"),
        )
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
            refuse(f"unknown setting {key} in the environment; known: {', '.join(sorted(known))}")
        values[known[key]] = value
    values.update(given)
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        what, got = first["msg"].removeprefix("Value error, "), repr(first.get("input"))
        refuse(f"--{where.replace('_', '-')}: {what}" + ("" if got in what else f", got {got}"))
