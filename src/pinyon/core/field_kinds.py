"""Kinds of values that a field from outside may hold, each a class with its limits."""

from __future__ import annotations

from typing import Any

from pinyon.core.errors import InvalidArgument

TOKEN_ID_BYTES, BIAS_BYTES, TEXT_CHAR_BYTES, TEXT_LENGTH_BYTES = 5, 13, 4, 4


class FieldKind:
    """A kind of value. JSON and messages guarantee its Python type, which is not checked here."""

    def check(self, name: str, value: Any) -> None:
        """Raises :class:`InvalidArgument` naming the field if the value is beyond the limits."""

    def highest_token(self, value: Any) -> int:
        """Returns the highest token id in the value, -1 if there is none."""
        return -1

    def list_bytes(self, value: Any) -> int:
        """Returns the maximum size of a list in a message; single values are small."""
        return 0


class Switch(FieldKind):
    """True or false."""


class Whole(FieldKind):
    """A whole number, up to ``high`` if there is one."""

    def __init__(self, low: int, high: int | None = None) -> None:
        self.low = low
        self.high = high

    def check(self, name: str, value: Any) -> None:
        if value < self.low or (self.high is not None and value > self.high):
            wanted = f"at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
            raise InvalidArgument(f"{name} must be {wanted}, got {value}", field=name)


class Number(FieldKind):
    """A number from ``low``, or from ``above`` it, to ``high``."""

    def __init__(self, low: float, high: float, *, above: bool = False) -> None:
        self.low = low
        self.high = high
        self.above = above

    def check(self, name: str, value: Any) -> None:
        if not self.low <= value <= self.high or (self.above and value == self.low):
            raise InvalidArgument(
                f"{name} must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}], got {value}", field=name
            )


class Texts(FieldKind):
    """A list of up to ``count`` texts of 1 to ``size_bytes`` bytes."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = count
        self.size_bytes = size_bytes

    def check(self, name: str, value: Any) -> None:
        if len(value) > self.count:
            raise InvalidArgument(f"at most {self.count} {name} strings, got {len(value)}", field=name)
        for text in value:
            if not self.fits(text):
                raise InvalidArgument(f"a {name} string must have 1 to {self.size_bytes} bytes", field=name)

    def fits(self, text: str) -> bool:
        return 0 < len(text.encode("utf-8", "surrogatepass")) <= self.size_bytes

    def list_bytes(self, value: Any) -> int:
        return TEXT_CHAR_BYTES * len("".join(value)) + TEXT_LENGTH_BYTES * len(value)


class TokenIds(FieldKind):
    """A list of up to ``count`` token ids."""

    def __init__(self, count: int) -> None:
        self.count = count

    def check(self, name: str, value: Any) -> None:
        if len(value) > self.count:
            raise InvalidArgument(f"{name} must be at most {self.count} token ids", field=name)

    def highest_token(self, value: Any) -> int:
        return max(value, default=-1)

    def list_bytes(self, value: Any) -> int:
        return TOKEN_ID_BYTES * len(value)


class TokenBiases(FieldKind):
    """Numbers from -``most`` to ``most`` for up to ``count`` token ids: pairs by rising token id, each id once."""

    def __init__(self, count: int, most: float) -> None:
        self.count = count
        self.most = most

    def check(self, name: str, value: Any) -> None:
        if len(value) > self.count:
            raise InvalidArgument(f"{name} must have at most {self.count} tokens", field=name)
        for token, bias in value:
            if not -self.most <= bias <= self.most:
                raise InvalidArgument(
                    f"{name} must give token ids a number in [{-self.most:g}, {self.most:g}], got {token}: {bias}",
                    field=name,
                )

    def highest_token(self, value: Any) -> int:
        return value[-1][0] if value else -1

    def list_bytes(self, value: Any) -> int:
        return BIAS_BYTES * len(value)
