"""Loads a service's settings from its command line, its environment and a file.

A field ``pool_mib`` of the worker is ``--pool-mib`` on the command line, ``PINYON_WORKER_POOL_MIB`` in the environment,
and ``pool_mib`` in the table ``[worker]`` of a TOML file (``--config``, ``PINYON_WORKER_CONFIG`` or ``PINYON_CONFIG``).
The command line wins over the environment, which wins over the file."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pinyon.core.compiled import version_line
from pinyon.core.errors import InvalidArgument
from pinyon.core.near import did_you_mean
from pinyon.runtime.arguments import Parser, module_as_typed
from pinyon.runtime.files import read_file
from pinyon.runtime.settings import Address, ServiceSettings, with_tls_files

Settings = TypeVar("Settings", bound=ServiceSettings)

SERVICES = ("agent", "conductor", "controller", "kvstore", "lb", "worker")
"""The services of a suite, which share one file: each has a table of its name."""
CONFIG = "CONFIG"
"""The name of the variable with the file, behind a service's prefix or behind that of all."""
CONFIG_BYTES_MAX = 1 << 20
NUMBER_BITS_MAX = 64
"""Bits of a whole number in a file, as TOML has them."""
HELP_COLUMNS_MAX = 100


def load_settings(
    cls: type[Settings], argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Returns the settings of a service; ends the program with a message and exit status 2 on bad input."""
    environ = os.environ if environ is None else environ
    prefix = cls.env_prefix()

    def refuse(message: str) -> NoReturn:
        sys.stderr.write(f"pinyon {cls.service()}: {message}\n")
        raise SystemExit(2)

    given = _of_command_line(cls, sys.argv[1:] if argv is None else argv)
    path = given.pop("config", None)
    of_environment = {}
    known = {prefix + name.upper(): name for name in cls.model_fields} | {prefix + CONFIG: ""}
    for key in sorted(environ, reverse=True):  # of names that differ in case alone, the one in capitals counts
        if key.startswith(prefix) and key not in known:
            refuse(
                f"unknown setting {key} in the environment{did_you_mean(key, known)}; known: {', '.join(sorted(known))}"
            )
        if name := known.get(key.upper()):
            of_environment[name] = environ[key]
    path = path or environ.get(prefix + CONFIG) or environ.get(f"PINYON_{CONFIG}", "")
    try:
        of_file = _of_file(cls, path) if path else {}
    except ValueError as error:
        refuse(str(error) if path in str(error) else f"{path}: {error}")
    try:
        # a folder of certificates counts where it is named, before files that a lesser source names
        return cls(**(with_tls_files(of_file) | with_tls_files(of_environment) | with_tls_files(given)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what, got = first["msg"].removeprefix("Value error, "), repr(first.get("input"))
        if first["type"] == "literal_error":
            got += did_you_mean(str(first["input"]), get_args(cls.model_fields[where].annotation))
        if not where:
            refuse(what)
        source = ""
        if where not in given:
            source = f" ({prefix}{where.upper()})" if where in of_environment else f" ({path})"
        refuse(f"{option(where)}{source}: {what}" + ("" if got in what else f", got {got}"))


def _of_file(cls: type[ServiceSettings], path: str) -> dict[str, Any]:
    """Returns the table of this service in a TOML file. Raises ``ValueError`` for a file that cannot be read, for
    unknown tables and settings, and for values that are no number, text or boolean."""
    service = cls.service()
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
        raise ValueError("it is no file")
    try:
        tables = tomllib.loads(read_file(path, CONFIG_BYTES_MAX, "config").decode("utf-8"))
    except InvalidArgument as error:
        raise ValueError(error.message) from None
    except RecursionError:
        raise ValueError("values lie too deep within others") from None
    services = sorted({service, *SERVICES})
    for name, table in tables.items():
        if name not in services:
            hint = did_you_mean(name, services)
            raise ValueError(f"{name!r} is no table of a service{hint}; known: [{'], ['.join(services)}]")
        if not isinstance(table, dict):
            raise ValueError(f"{name!r} must be a table: [{name}]")
    table = tables.get(service, {})
    for name, value in table.items():
        if name not in cls.model_fields:
            hint = did_you_mean(name, cls.model_fields)
            raise ValueError(f"unknown setting {name!r} in [{service}]{hint}; --help-all lists all")
        if not isinstance(value, str | int | float):
            raise ValueError(f"{name} in [{service}] must be a number, a text or a boolean, got {value!r:.100}")
        if isinstance(value, int) and value.bit_length() > NUMBER_BITS_MAX:
            raise ValueError(f"{name} in [{service}] has more than {NUMBER_BITS_MAX} bits")
    return dict(table)


def settings_inside(
    cls: type[Settings], extra: Mapping[str, Any], field: str, environ: Mapping[str, str] | None = None
) -> Settings:
    """Returns the settings of a part inside an inference engine, whose option ``field`` has them as ``extra``.

    They win over the environment. Raises :class:`InvalidArgument`."""
    environ = os.environ if environ is None else environ
    prefix, names = cls.env_prefix(), cls.model_fields
    unknown = [name for name in extra if name not in names]
    unknown += [name for name in environ if name.startswith(prefix) and name[len(prefix) :].lower() not in names]
    if unknown:
        hint = did_you_mean(unknown[0].removeprefix(prefix).lower(), names)
        raise InvalidArgument(f"unknown setting {unknown[0]}{hint}", field=field)
    given = {name: value for name in names if (value := environ.get(prefix + name.upper())) is not None}
    try:
        return cls(**(with_tls_files(given) | with_tls_files(dict(extra))))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidArgument(f"{where}: {message}" if where else message, field=field) from None


def _of_command_line(cls: type[ServiceSettings], argv: Sequence[str]) -> dict[str, Any]:
    """Returns the options that were given, and ``config`` if a file was."""
    whole = not {"--help-all", "--help_all"}.isdisjoint(argv)
    parser = Parser(
        prog=module_as_typed(f"services.{cls.service()}"),
        usage="%(prog)s [OPTION ...]",
        description=(cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else None,
        epilog="" if whole else f"{len(cls.model_fields) - len(cls.everyday_fields())} more options: --help-all",
        allow_abbrev=False,
        formatter_class=_Formatter,
        add_help=False,
    )
    own = parser.add_argument_group("this command")
    own.add_argument("-h", "--help", action="help", help="print the everyday options, and exit")
    own.add_argument("--help-all", action="help", help="print all options, and exit")
    own.add_argument("--version", action="version", version=version_line(), help="print the version, and exit")
    own.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file with settings: NAME = VALUE in a table [{cls.service()}]; those of the environment "
        f"({cls.env_prefix()}NAME) and options come before them",
    )
    everyday = cls.everyday_fields()
    for title, names in cls.grouped_fields().items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name, cls.model_fields[name], shown=whole or name in everyday)
    given = vars(parser.parse_args(["--help"] if whole else argv))
    return {name: value for name, value in given.items() if value is not None}


def _add(group: argparse._ArgumentGroup, name: str, field: FieldInfo, *, shown: bool) -> None:
    """Adds one option, with its default and its unit in the help text."""
    default = default_in_words(name, field)
    text = (field.description or "") + (f" (default: {default})" if default not in ("empty", "off") else "")
    flag: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
    group.add_argument(
        option(name),
        dest=name,
        default=None,
        metavar=_metavar(field),
        **flag,
        help=text.replace("%", "%%") if shown else argparse.SUPPRESS,
    )
    if field.default is True:
        help_ = f"turn {option(name)} off" if shown else argparse.SUPPRESS
        group.add_argument(f"--no-{name.replace('_', '-')}", dest=name, action="store_const", const="false", help=help_)


def option(name: str) -> str:
    """Returns the option of a field."""
    return f"--{name.replace('_', '-')}"


def default_in_words(name: str, field: FieldInfo) -> str:
    """Returns a field's default with the unit that its name ends in; ``empty``, ``on`` and ``off`` are words."""
    default = field.get_default(call_default_factory=False)
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, str):
        return default or "empty"
    number = f"{default:,}" if default >= 10_000 else f"{default:g}"
    return f"{number} {UNITS[suffix]}" if (suffix := name.rpartition("_")[2]) in UNITS and default >= 0 else number


UNITS = {
    "s": "s",
    "ms": "ms",
    "us": "µs",
    "mib": "MiB",
    "bytes": "bytes",
    "tokens": "tokens",
    "blocks": "blocks",
    "rpm": "requests/min",
    "tpm": "tokens/min",
}
"""The unit of a setting, by the last word of its name."""


def _metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return f"{{{','.join(get_args(field.annotation))}}}"
    if field.annotation is bool:
        return "true|false"
    if field.annotation in (int, float):
        return "NUMBER"
    return "HOST:PORT" if Address.__metadata__[0] in field.metadata else "TEXT"  # type: ignore[attr-defined]


class _Formatter(argparse.HelpFormatter):
    """Writes each option on a line of its own, and its help beneath."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6)
        self._width = min(self._width, HELP_COLUMNS_MAX)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)
