"""A policy is chosen by name and options; what is wrong with a choice is said with what is known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pinyon.core.policies import CHOICE_CHARS_MAX, NoSettings, Registry


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


def test_the_help_text_lists_options_and_defaults() -> None:
    assert REGISTRY.names == ("plain", "tuned")
    assert REGISTRY.described == "plain, tuned:share=0.5,window=3,strict=False"
