"""The ``pinyon journal`` command: makes a service's decisions again from its journal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.decisions import replay_journal

_DESCRIPTION = """\
Read a journal that a worker or a load balancer wrote (its setting --journal FILE), tell the same modules the same
things in the same order, and compare what they decide with what was decided. Of a folder, all *.jsonl are
read. The exit status is 0 when all of it is the same, and 1 when something differs or a file is no journal."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "journal", help="make a service's decisions again from its journal", description=_DESCRIPTION
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a journal, or a folder of them")
    parser.set_defaults(run=replay)


def replay(arguments: argparse.Namespace) -> int:
    """Prints how many decisions were made again, and those that differ."""
    path: Path = arguments.file
    if not path.is_dir():
        return _replay(path)
    journals = sorted(path.glob("*.jsonl"))
    if not journals:
        sys.stderr.write(f"pinyon: no journal in {path}: there is no *.jsonl\n")
        return 1
    return max([_replay(each, f"{each.name}: ") for each in journals])


def _replay(path: Path, name: str = "") -> int:
    """Replays one journal; its lines begin with ``name``."""
    try:
        with path.open(encoding="utf-8") as lines:
            seen = replay_journal(lines)
    except (OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"pinyon: cannot read {path}: {getattr(error, 'strerror', None) or error}\n")
        return 1
    except InvalidArgument as error:
        sys.stderr.write(f"pinyon: {path}: {error.message}\n")
        return 1
    for difference in seen.differences:
        sys.stdout.write(f"{name}{difference}\n")
    if seen.different > len(seen.differences):
        sys.stdout.write(f"{name}... and {seen.different - len(seen.differences)} more\n")
    said = f"{seen.different} decided otherwise" if seen.different else "all as recorded"
    sys.stdout.write(f"{name}{seen.calls} call{'s'[: seen.calls != 1]}, {said}\n")
    return 1 if seen.different else 0
