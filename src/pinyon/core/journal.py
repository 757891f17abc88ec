"""Journals: records of the calls to pure modules, and replays of these calls.

A pure module's decisions depend on nothing but its inputs. So a journal of the inputs is enough to reproduce every
decision of a service anywhere: to find a defect, or to ask another policy the same questions. The method
``Journal.record`` wraps a module. The function ``replay`` repeats the calls on modules that the caller built anew and
compares the results.

A journal is lines of JSON. The first line is a header, from which ``build`` makes the modules; then there is one line
per call. A line has ``t`` seconds since the start, ``m`` module, ``c`` method, ``a`` arguments (``n`` named ones), and
``r`` the result or ``e`` the name of the error. Values that JSON does not know are objects with one key:

- ``{"b": hex}`` bytes, ``{"p": [size, hex]}`` a list of bytes of one size (block keys)
- ``{"t": list}`` a tuple, ``{"s": [...]}`` a set, ``{"k": [[key, value], ...]}`` a dict
- ``{"v": [type, fields...]}`` a value of a named type"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument

VERSION = 2
DIFFERENCES_MAX = 16
"""The maximum number of differences that a replay describes; all are counted."""

Module = TypeVar("Module")


class Codec:
    """A conversion of values to JSON and back; ``types`` are the dataclasses, named tuples and enums that may occur."""

    def __init__(self, types: Iterable[type]) -> None:
        self._types = {one.__name__: one for one in types}

    def encode(self, value: Any) -> Any:
        """Returns a value as JSON. Raises :class:`TypeError` for a value of a type that was not named."""
        if isinstance(value, Enum):
            return self._named(value, [value.value])
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return {"b": bytes(value).hex()}
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                return self._named(value, [self.encode(item) for item in value])
            return {"t": self._items(value)}
        if is_dataclass(value):
            return self._named(value, [self.encode(getattr(value, one.name)) for one in fields(value)])
        if isinstance(value, Mapping):
            return {"k": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, set | frozenset):
            return {"s": sorted((self.encode(item) for item in value), key=json.dumps)}
        if isinstance(value, Sequence):
            return self._items(value)
        raise TypeError(f"a journal holds no {type(value).__name__}")

    def _items(self, value: Sequence[Any]) -> Any:
        """Encodes a list; long lists are block keys or block numbers and are encoded at once."""
        kinds = set(map(type, value))
        if kinds == {int}:
            return list(value)
        if kinds == {bytes} and len(sizes := set(map(len, value))) == 1 and (size := sizes.pop()):
            return {"p": [size, b"".join(value).hex()]}
        return [self.encode(item) for item in value]

    def _named(self, value: Any, items: list[Any]) -> dict[str, Any]:
        name = type(value).__name__
        if self._types.get(name) is not type(value):
            raise TypeError(f"a journal holds no {name}")
        return {"v": [name, *items]}

    def decode(self, value: Any) -> Any:
        """Returns the value of JSON. Raises :class:`InvalidArgument` for JSON that :meth:`encode` does not write."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        try:
            ((kind, content),) = value.items()
            if kind == "b":
                return bytes.fromhex(content)
            if kind == "p":
                size, packed = content[0], bytes.fromhex(content[1])
                return [packed[at : at + size] for at in range(0, len(packed), size)]
            if kind == "t":
                return tuple(self.decode(content))
            if kind == "s":
                return frozenset(self.decode(item) for item in content)
            if kind == "k":
                return {self.decode(key): self.decode(item) for key, item in content}
            if kind == "v":
                return self._types[content[0]](*(self.decode(item) for item in content[1:]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"no value of a journal: {value!r:.200}") from error
        raise InvalidArgument(f"no value of a journal: {value!r:.200}")


class Journal:
    """A writer of a header and then every recorded call. ``write`` receives whole lines without their end.

    ``ended`` says why writing has stopped, once it has. Recorded modules then work as if there were no journal."""

    ended = ""

    def __init__(self, write: Callable[[str], None], clock: Clock, codec: Codec, header: Mapping[str, Any]) -> None:
        self._write = write
        self._clock = clock
        self._codec = codec
        self._start_s = clock()
        write(_line({"pinyon_journal": VERSION, **header}))

    def record(self, name: str, module: Module, inputs: Sequence[str]) -> Module:
        """Returns a wrapper of ``module`` that records calls of the methods ``inputs``; all else passes unchanged.

        Parts of the module call it directly: the consequences of an input are not inputs."""
        for method in inputs:
            if not callable(getattr(module, method)):
                raise TypeError(f"{name}.{method} is no method")
        return cast("Module", _Recorded(self, name, module, frozenset(inputs)))

    def called(self, name: str, method: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Calls the method and records the call."""
        entry: dict[str, Any] = {"t": round(self._clock() - self._start_s, 6), "m": name, "c": method.__name__}
        # Arguments are encoded before the call, which may change them. A value that cannot be encoded ends the journal,
        # not the call.
        try:
            entry["a"] = [self._codec.encode(arg) for arg in args]
            if named:
                entry["n"] = {key: self._codec.encode(arg) for key, arg in named.items()}
        except TypeError as error:
            self.end(str(error))
            return method(*args, **named)
        try:
            result = method(*args, **named)
        except Exception as error:
            entry["e"] = type(error).__name__
            self._write(_line(entry))
            raise
        try:
            entry["r"] = self._codec.encode(result)
            self._write(_line(entry))
        except TypeError as error:
            self.end(str(error))
        return result

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason


class _Recorded:
    def __init__(self, journal: Journal, name: str, module: Any, inputs: frozenset[str]) -> None:
        self._journal = journal
        self._name = name
        self._module = module
        self._inputs = inputs

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._module, attribute)
        if attribute not in self._inputs:
            return found

        def call(*args: Any, **named: Any) -> Any:
            if self._journal.ended:
                return found(*args, **named)
            # an iterator can be read only once, by the journal or by the module
            held = [list(arg) if isinstance(arg, Iterator | KeysView | ValuesView) else arg for arg in args]
            return self._journal.called(self._name, found, held, named)

        self.__dict__[attribute] = call  # later accesses bypass __getattr__
        return call

    def __len__(self) -> int:
        return len(self._module)

    def __contains__(self, item: object) -> bool:
        return item in self._module


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. ``differences`` describes the first differences, with their line numbers."""

    calls: int
    different: int
    differences: list[str]
    modules: Mapping[str, object]
    """The modules as they are after the last call."""


def replay(
    lines: Iterable[str],
    build: Callable[[Mapping[str, Any]], Mapping[str, object]],
    codec: Codec,
    inputs: Mapping[str, Sequence[str]],
    gone: Collection[tuple[str, str]] = (),
) -> Replay:
    """Repeats a journal's calls.

    The function ``build`` makes the modules by name from the header. Only the methods in ``inputs`` of each module are
    called, whatever the journal says. Named arguments (module, name) in ``gone`` are dropped: they occur in older
    journals, changed nothing and no longer exist.

    A last line without an end (the process died while it wrote) is left out. Raises :class:`InvalidArgument`, with the
    line's number, for malformed lines."""
    calls = different = 0
    differences: list[str] = []
    modules: Mapping[str, object] = {}
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            entry = json.loads(line)
            if number == 1:
                if entry.get("pinyon_journal") != VERSION:
                    raise InvalidArgument(f"no journal of version {VERSION}")
                modules = build(entry)
                continue
            if entry["c"] not in inputs[entry["m"]]:
                raise InvalidArgument(f"{entry['c']!r:.100} is no input of {entry['m']}")
            method = getattr(modules[entry["m"]], entry["c"])
            args = [codec.decode(arg) for arg in entry["a"]]
            named = {key: codec.decode(arg) for key, arg in entry.get("n", {}).items() if (entry["m"], key) not in gone}
            was = {key: entry[key] for key in ("r", "e") if key in entry}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise InvalidArgument(f"line {number}: {type(error).__name__}: {error}") from error
        except InvalidArgument as error:
            raise InvalidArgument(f"line {number}: {error.message}") from None
        calls += 1
        try:
            now = {"r": codec.encode(method(*args, **named))}
        except Exception as error:  # as in the recording, an error is a result too
            now = {"e": type(error).__name__}
        if now != was:
            different += 1
            if len(differences) < DIFFERENCES_MAX:
                differences.append(f"line {number}: {entry['m']}.{entry['c']}: was {was!r:.300}, is {now!r:.300}")
    if not modules:
        raise InvalidArgument("an empty journal")
    return Replay(calls, different, differences, modules)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"))
