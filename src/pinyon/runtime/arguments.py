"""Command lines with options spelled with hyphens; the error about an unknown word suggests a similar one."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from pinyon.core.near import did_you_mean


def module_as_typed(module: str) -> str:
    """Returns ``PYTHON -m MODULE``, with the interpreter as typed if this program was started that way."""
    typed = sys.orig_argv
    python = typed[0] if typed[1:3] == ["-m", module] else "python"
    return shlex.join([python, "-m", module])


class Parser(argparse.ArgumentParser):
    """A parser that takes underscores in options for hyphens, and suggests words similar to unknown options or choices.

    Parsers of subcommands are of this class, too."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parses as the base class does, but ends the program at unknown words, as this parser knows similar ones."""
        given = _hyphened(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            # This check comes first: an unknown option may be the cause of a missing value or argument.
            self._refuse(given[: given.index("--")] if "--" in given else given)
        found, left = super().parse_known_args(given, namespace)
        if left:
            self._refuse(left)
            left = self._placed(found, left)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _placed(self, found: Any, words: list[str]) -> list[str]:
        """Gives words after an option to optional arguments that ``argparse`` took as left out; returns the rest."""
        if any(each.startswith("-") for each in words):
            return words
        for action in self._get_positional_actions():
            if not words or action.nargs not in ("*", "?") or getattr(found, action.dest) not in (None, []):
                continue
            taken = len(words) if action.nargs == "*" else 1
            try:
                action(self, found, self._get_values(action, words[:taken]))
            except argparse.ArgumentError as error:
                self.error(str(error))
            words = words[taken:]
        return words

    def _refuse(self, given: Sequence[str]) -> None:
        """Ends the program at the first long option that is neither known nor the beginning of a known one."""
        known = list(self._option_string_actions)
        for each in given:
            option = each.partition("=")[0]
            if not option.startswith("--") or option == "--" or " " in each or option in known:
                continue
            if self.allow_abbrev and any(name.startswith(option) for name in known):
                continue
            self.error(f"unrecognized option: {option}{did_you_mean(option, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            hint = did_you_mean(str(value), choices)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}, choose from {', '.join(choices)}")


def _hyphened(given: Sequence[str]) -> list[str]:
    """Returns the words with hyphens in option names; words after ``--`` are no options and stay as they are."""
    args = list(given)
    end = args.index("--") if "--" in args else len(args)
    for place, each in enumerate(args[:end]):
        option, equals, value = each.partition("=")
        if option.startswith("--") and " " not in option:
            args[place] = f"{option.replace('_', '-')}{equals}{value}"
    return args
