"""Policies by name, for settings that choose one of several.

A choice is written ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``. Each policy has a settings object of its own, a
frozen dataclass that checks its bounds in ``__post_init__`` (raising ``ValueError``); its fields are the options. An
option is a number, a boolean, a word of a ``StrEnum``, or of a class with ``of_text``, which raises ``ValueError``.

``NAME`` can be ``MODULE:CLASS``, a policy of one's own (:func:`named_class`): its constructor takes nothing,
or its settings, and is annotated with their class."""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from pinyon.core.near import did_you_mean

Policy = TypeVar("Policy")

CONTAINERS = ("__contains__", "__iter__", "__len__")
"""Special methods of a base that a policy must have as well."""
SETTINGS = "settings_type"
"""The attribute by which a compiled class names its settings, since it has no annotations."""

CHOICE_CHARS_MAX = 1 << 17
"""The maximum length of a choice; an option may be a table (:class:`pinyon.eviction.day_fits.DayFits`)."""


@dataclass(frozen=True, slots=True)
class NoSettings:
    """The settings of a policy that has no options."""


def check_bounds(settings: object, **bounds: tuple[float, float]) -> None:
    """Raises ``ValueError`` for the first of these fields that is not within its bounds."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            shown = [f"{each:g}" if isinstance(each, float) else str(each) for each in (least, most)]
            raise ValueError(f"{name} must be from {shown[0]} to {shown[1]}, got {value}")


class Registry(Generic[Policy]):
    """The policies of one ``kind`` (a word for messages): settings type and factory by name.

    ``base`` is the interface that a policy of one's own implements, and may derive from; None allows no such policies.
    """

    def __init__(
        self,
        kind: str,
        policies: Mapping[str, tuple[type[Any], Callable[[Any], Policy]]],
        base: type[Any] | None = None,
    ) -> None:
        self.kind = kind
        self._policies = dict(policies)
        self._base = base

    def offer(self, policies: Mapping[str, tuple[type[Any], Callable[[Any], Policy]]]) -> None:
        """Adds these policies in this process; they replace those of the same names."""
        self._policies.update(policies)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._policies)

    @property
    def choices(self) -> str:
        """All names, in words; options and defaults are in :attr:`described`."""
        *most, last = [*self._policies, *(["MODULE:CLASS"] if self._base is not None else [])]
        return f"{', '.join(most)} or {last}"

    @property
    def described(self) -> str:
        """All choices with their options and defaults, for a help text."""
        shown = []
        for name, (settings, _) in self._policies.items():
            options = ",".join(f"{field.name}={field.default}" for field in fields(settings))
            shown.append(f"{name}:{options}" if options else name)
        own = [] if self._base is None else [f"MODULE:CLASS of {MODULES}"]
        return ", ".join(shown + own)

    def make(self, choice: str) -> Policy:
        """Returns a new policy as chosen. Raises ``ValueError`` that names what is wrong and what is known instead."""
        settings, factory = self._parsed(choice)
        return factory(settings)

    def checked(self, choice: str) -> str:
        """Returns ``choice`` unchanged, to validate a setting; raises as :meth:`make` does."""
        self._parsed(choice)
        return choice

    def with_default(self, choice: str, option: str, value: object) -> str:
        """Returns ``choice`` with an option added, unless it names that or its policy lacks it. Raises as
        :meth:`make`."""
        self._parsed(choice)
        name, text = split_choice(choice, self._policies)
        named = [part.partition("=")[0].strip() for part in text.split(",")] if text else []
        if option in named or option not in [field.name for field in fields(self._chosen(name)[0])]:
            return choice
        return f"{name}:{','.join(part for part in (text, f'{option}={value}') if part)}"

    def _parsed(self, choice: str) -> tuple[Any, Callable[[Any], Policy]]:
        if len(choice) > CHOICE_CHARS_MAX:
            raise ValueError(f"a choice of {self.kind} policy has at most {CHOICE_CHARS_MAX} characters")
        name, text = split_choice(choice, self._policies)
        kind, factory = self._chosen(name)
        try:
            return kind(**({} if text is None else _options(text, kind))), factory
        except ValueError as error:
            raise ValueError(f"{self.kind} policy {name}: {error}") from None

    def _chosen(self, name: str) -> tuple[type[Any], Callable[[Any], Policy]]:
        known = self._policies.get(name)
        if known is not None:
            return known
        if self._base is None or ":" not in name:
            hint = did_you_mean(name.partition(":")[0], self._policies)
            own = "" if self._base is None else ", and MODULE:CLASS"
            raise ValueError(f"no {self.kind} policy {name!r}{hint}; known: {', '.join(self._policies)}{own}")
        try:
            policy = named_class(name)
            return _own(policy, self._base)
        except ValueError as error:
            hint = did_you_mean(name.partition(":")[0], self._policies)
            base = f"{self._base.__module__}.{self._base.__name__}"
            raise ValueError(
                f"{self.kind} policy {name}{hint}: {error} (a policy of your own implements {base}, and may derive "
                "from it; docs/use/policies.md says from what else)"
            ) from None


def split_choice(choice: str, names: Iterable[str]) -> tuple[str, str | None]:
    """Returns the policy's name, one of ``names`` or ``MODULE:CLASS``, and the text of its options or None."""
    name, colon, text = choice.partition(":")
    if name not in names:
        inner, more, options = text.partition(":")
        if inner.isidentifier() and all(part.isidentifier() for part in name.split(".")):
            return f"{name}:{inner}", options if more else None
    return name, text if colon else None


def _own(policy: type[Any], base: type[Any]) -> tuple[type[Any], Callable[[Any], Any]]:
    """Returns the settings type and the factory of a class that implements ``base``."""
    wanted = [name for name in vars(base) if name in CONTAINERS or not name.startswith("_")]
    if missing := [name for name in wanted if not hasattr(policy, name)]:
        raise ValueError(f"the class has no {', '.join(missing)}")
    kind = getattr(policy, SETTINGS, None) or _annotated(policy)
    if kind is None:
        return NoSettings, lambda _: policy()
    if not (isinstance(kind, type) and is_dataclass(kind) and _has_options(kind)):
        raise ValueError(
            "its constructor must take nothing, or its settings alone, annotated with a dataclass of numbers, "
            "booleans, text or words of a StrEnum, each with a default"
        )
    return kind, policy


def _annotated(policy: type[Any]) -> object:
    """Returns the class that annotates the constructor's only argument; None if there is no argument."""
    parameters = [
        each
        for each in inspect.signature(policy).parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if not parameters:
        return None
    if any(each.default is each.empty for each in parameters[1:]):
        return object
    try:
        kind = get_type_hints(policy.__init__).get(parameters[0].name, object)
    except NameError as error:
        raise ValueError(f"the annotation of {parameters[0].name}: {error}") from None
    return next((each for each in get_args(kind) if is_dataclass(each)), kind)


def _has_options(kind: type[Any]) -> bool:
    """Returns whether all fields can be written as options, and left out."""
    types = get_type_hints(kind)
    return all(field.default is not MISSING and isinstance(types[field.name], type) for field in fields(kind))


def _options(text: str, kind: type[Any]) -> dict[str, object]:
    types = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    values: dict[str, object] = {}
    for part in text.split(","):
        option, equals, value = (each.strip() for each in part.partition("="))
        if option not in known:
            hint = did_you_mean(option, known)
            raise ValueError(f"no option {option!r}{hint}; known: {', '.join(known) or 'none'}")
        if not equals or option in values:
            raise ValueError(f"option {option} must be given once, as {option}=VALUE")
        values[option] = _value(option, value, types[option])
    return values


def _value(option: str, text: str, kind: type[Any]) -> object:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{option} must be true or false, got {text!r}")
        return text.lower() == "true"
    if issubclass(kind, Enum):
        words = [str(word.value) for word in kind]
        if text not in words:
            raise ValueError(f"{option} must be one of {', '.join(words)}, got {text!r}{did_you_mean(text, words)}")
        return kind(text)
    if of_text := getattr(kind, "of_text", None):
        return of_text(text)
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{option} must be {'an integer' if kind is int else 'a number'}, got {text!r}")
    return value


MODULES = "PINYON_POLICY_MODULES"
"""The environment variable: names of modules or packages, with commas. It cannot be changed from outside."""


def named_class(name: str) -> type[Any]:
    """Returns ``module:Class``; imports only modules that the environment names. Raises ``ValueError`` with the
    reason."""
    module, _, wanted = name.partition(":")
    if not _allowed(module):
        raise ValueError(
            f"{module} may not be imported here: start the process with {MODULES}={module}, or add it there"
        )
    try:
        content = vars(importlib.import_module(module))
    except Exception as error:  # importing a module may raise any error
        absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        hint = "; is its folder on PYTHONPATH, as an absolute path?" if absent else ""
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    found = content.get(wanted)
    if not isinstance(found, type):
        classes = [each for each, value in content.items() if isinstance(value, type)]
        raise ValueError(f"{module} has no class {wanted!r}{did_you_mean(wanted, classes)}")
    if not _allowed(found.__module__):  # the module only imports the class
        raise ValueError(f"{wanted} is a class of {found.__module__}, which {MODULES} does not name")
    return found


def _allowed(module: str) -> bool:
    named = (each.strip() for each in os.environ.get(MODULES, "").split(","))
    return any(each and (module == each or module.startswith(f"{each}.")) for each in named)
