"""Policies by name: how settings choose one where a seam has several.

A choice is written ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``. Each policy has a settings object of its own, a
frozen dataclass that checks its bounds in ``__post_init__`` (raising ``ValueError``); its fields are the options:
numbers, booleans, words of a ``StrEnum``, or of a class that has ``of_text``, which raises ``ValueError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, TypeVar, get_type_hints

from pinyon.core.near import did_you_mean

__all__ = ["NoSettings", "Registry"]

Policy = TypeVar("Policy")

CHOICE_CHARS_MAX = 1 << 17
"""An option may be a table (:class:`pinyon.eviction.day_fits.DayFits`)."""


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Settings of a policy that has no options."""


class Registry(Generic[Policy]):
    """The policies of one ``kind`` (a word for messages): name to settings type and what makes a policy of them."""

    def __init__(self, kind: str, policies: Mapping[str, tuple[type[Any], Callable[[Any], Policy]]]) -> None:
        self.kind = kind
        self._policies = dict(policies)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._policies)

    @property
    def described(self) -> str:
        """All choices with their options and defaults, for a help text."""
        shown = []
        for name, (settings, _) in self._policies.items():
            options = ",".join(f"{field.name}={field.default}" for field in fields(settings))
            shown.append(f"{name}:{options}" if options else name)
        return ", ".join(shown)

    def make(self, choice: str) -> Policy:
        """A new policy as chosen. Raises ``ValueError`` that names what is wrong and what is known instead."""
        settings, factory = self._parsed(choice)
        return factory(settings)

    def checked(self, choice: str) -> str:
        """``choice`` as it is; raises as :meth:`make` does. What validates a setting."""
        self._parsed(choice)
        return choice

    def with_default(self, choice: str, option: str, value: object) -> str:
        """``choice`` with an option that it does not name, where its policy has that. Raises as :meth:`make` does."""
        self._parsed(choice)
        name, _, text = choice.partition(":")
        named = [part.partition("=")[0].strip() for part in text.split(",")] if text else []
        if option in named or option not in [field.name for field in fields(self._policies[name][0])]:
            return choice
        return f"{name}:{','.join(part for part in (text, f'{option}={value}') if part)}"

    def _parsed(self, choice: str) -> tuple[Any, Callable[[Any], Policy]]:
        if len(choice) > CHOICE_CHARS_MAX:
            raise ValueError(f"a choice of {self.kind} policy has at most {CHOICE_CHARS_MAX} characters")
        name, colon, text = choice.partition(":")
        if name not in self._policies:
            hint = did_you_mean(name, self._policies)
            raise ValueError(f"no {self.kind} policy {name!r}{hint}; known: {', '.join(self._policies)}")
        kind, factory = self._policies[name]
        try:
            return kind(**_options(text, kind) if colon else {}), factory
        except ValueError as error:
            raise ValueError(f"{self.kind} policy {name}: {error}") from None


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
