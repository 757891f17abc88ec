"""Journals: the inputs of a module come back unchanged, and a replay sees every difference."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.core.journal import DIFFERENCES_MAX, Codec, Journal, Replay, replay


class Colour(StrEnum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: str


@dataclass(frozen=True)
class Parcel:
    keys: tuple[bytes, ...]
    colour: Colour = Colour.RED


CODEC = Codec((Colour, Pair, Parcel))
INPUTS = {"shelf": ("put", "take_all")}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.frozensets(st.integers() | st.binary())
        | st.dictionaries(st.binary() | st.text(), inner)
        | st.builds(Parcel, st.lists(st.binary()).map(tuple))
        | st.builds(Pair, st.integers(), st.text())
    ),
    max_leaves=12,
)


@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = CODEC.decode(json.loads(json.dumps(CODEC.encode(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("value", [object(), lambda: None, complex(1, 2)])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a journal holds no"):
        CODEC.encode(value)


def test_a_type_that_was_not_named_is_refused() -> None:
    with pytest.raises(TypeError, match="Parcel"):
        Codec((Colour,)).encode(Parcel(()))


@pytest.mark.parametrize(
    "value", [{"b": "zz"}, {"v": ["Nobody"]}, {"v": ["Pair", 1]}, {"q": 1}, {}, {"b": "", "t": []}]
)
def test_what_was_never_written_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="no value of a journal"):
        CODEC.decode(value)


@dataclass
class Shelf:
    """A module like the pure ones: state, inputs, answers."""

    limit: int
    parcels: list[Parcel] = field(default_factory=list)

    def put(self, parcel: Parcel, now_s: float) -> int:
        if len(self.parcels) >= self.limit:
            raise NotFound("no room")
        self.parcels.append(parcel)
        return len(self.parcels)

    def take_all(self, keys: Iterable[bytes], *, sort: bool = False) -> list[bytes]:
        wanted = list(keys)
        taken = [key for parcel in self.parcels for key in parcel.keys if key in wanted]
        self.parcels.clear()
        return sorted(taken) if sort else taken

    @property
    def count(self) -> int:
        return len(self.parcels)

    def __len__(self) -> int:
        return len(self.parcels)

    def __contains__(self, parcel: object) -> bool:
        return parcel in self.parcels


def record(calls: int = 3) -> list[str]:
    lines: list[str] = []
    time_s = iter(range(100, 200))
    journal = Journal(lambda line: lines.append(line + "\n"), lambda: next(time_s), CODEC, {"limit": 2})
    shelf = journal.record("shelf", Shelf(2), ("put", "take_all"))
    assert shelf.put(Parcel((b"a", b"b")), 1.0) == 1
    assert shelf.put(Parcel((b"c",)), now_s=2.0) == 2
    assert shelf.count == len(shelf) == 2
    assert Parcel((b"c",)) in shelf
    for _ in range(calls - 2):
        with pytest.raises(NotFound):
            shelf.put(Parcel(()), 3.0)
    assert shelf.take_all((key for key in (b"c", b"a")), sort=True) == [b"a", b"c"]  # the generator is read once
    return lines


def again(lines: Sequence[str], limit: int | None = None) -> Replay:
    def build(header: Mapping[str, Any]) -> Mapping[str, object]:
        return {"shelf": Shelf(header["limit"] if limit is None else limit)}

    return replay(lines, build, CODEC, INPUTS)


def test_a_replay_makes_the_same_calls_and_compares_the_answers() -> None:
    lines = record()
    seen = again(lines)
    assert (seen.calls, seen.different, seen.differences) == (4, 0, [])
    assert len(lines) == 5
    assert seen.modules["shelf"] == Shelf(2)


def test_a_module_that_decides_otherwise_is_found_out() -> None:
    seen = again(record(), limit=3)
    assert seen.different == 1
    assert seen.differences[0].startswith("line 4: shelf.put: was {'e': 'NotFound'}, is {'r': 3}")


def test_differences_are_all_counted_and_some_described() -> None:
    seen = again(record(calls=50), limit=1000)
    assert seen.different == 48
    assert len(seen.differences) == DIFFERENCES_MAX


def test_times_are_seconds_since_the_start() -> None:
    assert [json.loads(line).get("t") for line in record()] == [None, 1, 2, 3, 4]


def test_a_line_that_was_not_written_whole_is_left_out() -> None:
    lines = record()
    lines[-1] = lines[-1][:-20]
    assert again(lines).calls == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"m":"shelf"}\n', "line 2: KeyError"),
        ('{"m":"desk","c":"put","a":[]}\n', "line 2: KeyError"),
        ('{"m":"shelf","c":"burn","a":[]}\n', "'burn' is no input of shelf"),
        ("[]\n", "line 2: TypeError"),
        ("nonsense\n", "line 2: JSONDecodeError"),
        ('{"m":"shelf","c":"__setattr__","a":["limit",9]}\n', "is no input of shelf"),
        ('{"m":"shelf","c":"put","a":[' + "[" * 100_000 + "]" * 100_000 + "]}\n", "line 2: RecursionError"),
        ('{"m":"shelf","c":"put","a":[{"q":1}]}\n', "line 2: no value of a journal"),
    ],
)
def test_what_is_no_journal_is_refused_with_its_line(line: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        again([record()[0], line])


@pytest.mark.parametrize("lines", [[], ['{"pinyon_journal":99}\n'], ["{}\n"]])
def test_other_files_are_refused(lines: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        again(lines)


def test_only_methods_can_be_recorded() -> None:
    journal = Journal(lambda line: None, lambda: 0.0, CODEC, {})
    with pytest.raises(TypeError, match="count is no method"):
        journal.record("shelf", Shelf(1), ("count",))


def test_an_unwritable_value_ends_the_journal_but_not_the_call() -> None:
    lines: list[str] = []
    journal = Journal(lines.append, lambda: 0.0, CODEC, {})
    shelf = journal.record("shelf", Shelf(9), ("put", "take_all"))
    assert shelf.put(Parcel((b"a",)), 1.0) == 1
    assert shelf.put(Parcel((complex(1, 2),)), 1.0) == 2  # type: ignore[arg-type]
    assert "complex" in journal.ended
    assert shelf.put(Parcel(()), 1.0) == 3
    assert len(lines) == 2
