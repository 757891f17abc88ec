"""``pinyon journal``: make a service's decisions again from what it wrote down."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.decisions import replay_journal

__all__ = ["add_command", "replay"]

_DESCRIPTION = """\
Read a journal that a worker or a load balancer wrote (its setting --journal FILE), tell the same modules the same
things in the same order, and compare what they decide with what was decided. The exit status is 0 when all of it is
the same, and 1 when something differs or the file is no journal."""


def add_command(commands: Any) -> None:
    """Register the command with the sub-parsers of the ``pinyon`` command."""
    parser = commands.add_parser("journal", help="decide again what a service decided", description=_DESCRIPTION)
    parser.add_argument("file", metavar="FILE")
    parser.set_defaults(run=replay)


def replay(arguments: argparse.Namespace) -> int:
    """Print how many decisions were made again, and those that differ."""
    try:
        with open(arguments.file, encoding="utf-8") as lines:
            seen = replay_journal(lines)
    except (OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"pinyon: cannot read {arguments.file}: {getattr(error, 'strerror', None) or error}\n")
        return 1
    except InvalidArgument as error:
        sys.stderr.write(f"pinyon: {arguments.file}: {error.message}\n")
        return 1
    for difference in seen.differences:
        sys.stdout.write(f"{difference}\n")
    if seen.different > len(seen.differences):
        sys.stdout.write(f"... and {seen.different - len(seen.differences)} more\n")
    sys.stdout.write(f"{seen.calls} calls, {seen.different} decided otherwise\n")
    return 1 if seen.different else 0
