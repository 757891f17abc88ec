"""The choice of a policy by name and options; an error in a choice names what is known."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import pytest

from pinyon.core.policies import CHOICE_CHARS_MAX, MODULES, NoSettings, Registry


@dataclass(frozen=True)
class Tuned:
    share: float = 0.5
    window: int = 3
    strict: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], got {self.share}")


REGISTRY: Registry[object] = Registry("toy", {"plain": (NoSettings, lambda _: "plain"), "tuned": (Tuned, lambda s: s)})


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ("plain", "plain"),
        ("tuned", Tuned()),
        ("tuned:share=1", Tuned(share=1.0)),
        ("tuned: share=0.25 , window=7,strict=true", Tuned(0.25, 7, True)),
    ],
)
def test_a_choice(choice: str, made: object) -> None:
    assert REGISTRY.make(choice) == made
    assert REGISTRY.checked(choice) == choice


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("nonsense", "no toy policy 'nonsense'; known: plain, tuned"),
        ("", "no toy policy ''; known: plain, tuned"),
        ("tuned:", "toy policy tuned: no option ''; known: share, window, strict"),
        ("tuned:size=1", "toy policy tuned: no option 'size'; known: share, window, strict"),
        ("plain:size=1", "toy policy plain: no option 'size'; known: none"),
        ("tund", "no toy policy 'tund' (did you mean 'tuned'?); known: plain, tuned"),
        ("tuned:windo=1", "toy policy tuned: no option 'windo' (did you mean 'window'?); known: share, window, strict"),
        ("tuned:share", "toy policy tuned: option share must be given once, as share=VALUE"),
        ("tuned:share=1,share=0", "toy policy tuned: option share must be given once, as share=VALUE"),
        ("tuned:share=2", "toy policy tuned: share must be in [0, 1], got 2.0"),
        ("tuned:share=nan", "toy policy tuned: share must be a number, got 'nan'"),
        ("tuned:share=", "toy policy tuned: share must be a number, got ''"),
        ("tuned:window=1.5", "toy policy tuned: window must be an integer, got '1.5'"),
        ("tuned:strict=1", "toy policy tuned: strict must be true or false, got '1'"),
        ("tuned:" + "x" * CHOICE_CHARS_MAX, "a choice of toy policy has at most 131072 characters"),
    ],
)
def test_a_bad_choice(choice: str, message: str) -> None:
    for look in (REGISTRY.make, REGISTRY.checked):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
            look(choice)
        assert str(caught.value) == message


def test_where_own_policies_are_taken_an_unknown_name_says_so() -> None:
    with pytest.raises(ValueError, match=r"known: plain, and MODULE:CLASS$"):
        Registry("toy", {"plain": (NoSettings, lambda _: "plain")}, object).checked("nonsense")


def test_the_help_text_lists_options_and_defaults() -> None:
    assert REGISTRY.names == ("plain", "tuned")
    assert REGISTRY.described == "plain, tuned:share=0.5,window=3,strict=False"


class Plain(Protocol):
    def play(self) -> str: ...


class Played:
    """A policy of an importable module; ``Tuned`` and ``Fraction`` are no policies."""

    def play(self) -> str:
        return "played"


class PlayedSo(Plain):
    def __init__(self, settings: Tuned | None = None) -> None:
        self.settings = settings

    def play(self) -> str:
        return "so"


class Demanding(Played):
    def __init__(self, settings: Tuned, more: int) -> None: ...


class Open(Played):
    def __init__(self, settings: OpenSettings) -> None: ...


@dataclass(frozen=True)
class OpenSettings:
    share: float


OWN: Registry[Plain] = Registry("toy", {"plain": (NoSettings, lambda _: Played())}, Plain)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which this module may be imported."""
    monkeypatch.setitem(sys.modules, "own_toys.here", sys.modules[__name__])
    for each in (Played, PlayedSo, Demanding, Open):
        monkeypatch.setattr(each, "__module__", "own_toys.here")
    assert Fraction.__module__ == "fractions", "which is a class of this module, and not its own"
    monkeypatch.setenv(MODULES, "others, own_toys")
    return "own_toys.here"


def test_a_policy_of_ones_own_is_chosen_by_its_module_and_class(module: str) -> None:
    assert type(OWN.make(f"{module}:Played")) is Played
    made = OWN.make(f"{module}:PlayedSo:share=0.25,strict=true")
    assert isinstance(made, PlayedSo)
    assert made.settings == Tuned(0.25, 3, True)
    assert OWN.checked(f"{module}:PlayedSo") == f"{module}:PlayedSo"
    assert OWN.with_default(f"{module}:PlayedSo", "window", 5) == f"{module}:PlayedSo:window=5"
    assert OWN.with_default(f"{module}:PlayedSo:window=1", "window", 5) == f"{module}:PlayedSo:window=1"
    assert OWN.with_default(f"{module}:Played", "window", 5) == f"{module}:Played"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("own_toy:Played", "own_toy may not be imported here: start the process with PINYON_POLICY_MODULES=own_toy"),
        ("own_toyshop.here:Played", "own_toyshop.here may not be imported here"),
        ("os:abort", "os may not be imported here"),
        ("plan:Played", "(did you mean 'plain'?): plan may not be imported here"),
        ("own_toys.none:Played", "own_toys.none cannot be imported: ModuleNotFoundError"),
        ("own_toys.none:Played", "No module named 'own_toys'; is its folder on PYTHONPATH, as an absolute path?"),
        ("own_toys.here:Playd", "own_toys.here has no class 'Playd' (did you mean 'Played'?)"),
        ("own_toys.here:OWN", "own_toys.here has no class 'OWN'"),
        ("own_toys.here:Fraction", "Fraction is a class of fractions, which PINYON_POLICY_MODULES does not name"),
        ("own_toys.here:Demanding", "its constructor must take nothing, or its settings alone, annotated with"),
        ("own_toys.here:Open", "its constructor must take nothing, or its settings alone, annotated with"),
        ("own_toys.here:PlayedSo:share=2", "share must be in [0, 1], got 2.0"),
        ("own_toys.here:PlayedSo:size=2", "no option 'size'; known: share, window, strict"),
        ("own_toys.here:Played:size=2", "no option 'size'; known: none"),
        ("own_toys.here:", "no toy policy 'own_toys.here'"),
        ("own_toys.here:no class", "no toy policy 'own_toys.here'"),
    ],
)
def test_a_bad_choice_of_ones_own(module: str, choice: str, message: str) -> None:
    for look in (OWN.make, OWN.checked):
        with pytest.raises(ValueError, match=re.escape(message)):
            look(choice)


def test_a_class_that_lacks_a_method_is_told_its_interface(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuned, "__module__", module)
    with pytest.raises(
        ValueError, match=rf"{module}:Tuned: the class has no play \(a policy of your own implements .*"
    ):
        OWN.make(f"{module}:Tuned")


def test_nothing_is_imported_that_was_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_secret.py").write_text("class Played:\n    def play(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for named in ("", "own", "own_secret.here", "own_secre"):
        monkeypatch.setenv(MODULES, named)
        with pytest.raises(ValueError, match="own_secret may not be imported here"):
            OWN.make("own_secret:Played")
        assert "own_secret" not in sys.modules
    monkeypatch.setenv(MODULES, "own_secret")
    with pytest.raises(ValueError, match="no toy policy 'own_secret:Played'"):
        REGISTRY.make("own_secret:Played")  # this kind has no policies of one's own
    assert "own_secret" not in sys.modules
    assert type(OWN.make("own_secret:Played")).__module__ == "own_secret"
    del sys.modules["own_secret"]


def test_a_process_may_offer_more_by_name() -> None:
    registry: Registry[object] = Registry("toy", {"plain": (NoSettings, lambda _: "plain")})
    registry.offer({"plain": (NoSettings, lambda _: "plainer"), "tuned": (Tuned, lambda settings: settings)})
    assert registry.names == ("plain", "tuned")
    assert registry.make("plain") == "plainer"
    assert registry.make("tuned:window=1") == Tuned(window=1)
