"""``pinyon top``: regions, load balancers and instances as they are, second by second."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import grpc

from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.cli.channel import add_tls_dir, open_channel
from pinyon.cli.regions import CONTROLLER_ADDRESS
from pinyon.cli.top_frame import Line, Sample, controller_frame, metrics_frame
from pinyon.core.errors import PinyonError, Unavailable
from pinyon.runtime.identity import CONTROLLER

__all__ = ["add_command", "top"]

LOOK_S = 0.1
"""Between two looks at the keyboard and the size of the window."""
PAGE_BYTES_MAX = 16 << 20
ROWS_OF_A_PIPE = 1000
COLUMNS_OF_A_PIPE = 200

_DESCRIPTION = """\
A live view of what the controller knows: regions, load balancers, queues, how much of the prompts instances held
(HITS), requests forwarded to other regions and taken from them, who serves what (a star: for somebody else), and
instances, the busiest first. With --lb, one load balancer's own metrics instead. "q" or Ctrl-C ends it."""

_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The other screen, without a cursor; and back."""
_STYLES = {"bold": "\x1b[1m", "red": "\x1b[31m", "yellow": "\x1b[33m", "dim": "\x1b[2m"}
_PLAIN = "\x1b[0m"

Draw = Callable[[int, int], list[Line]]
"""For so many columns and rows."""


def add_command(commands: Any) -> None:
    """Register the command with the sub-parsers of the ``pinyon`` command."""
    parser = commands.add_parser("top", help="regions, load balancers and instances, live", description=_DESCRIPTION)
    parser.add_argument(
        "--controller", default=CONTROLLER_ADDRESS, metavar="HOST:PORT", help=f"its gRPC (default {CONTROLLER_ADDRESS})"
    )
    parser.add_argument("--lb", default="", metavar="ADDRESS", help="a load balancer's HTTP: host:port or https://...")
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between two looks (default 1)")
    parser.add_argument("--once", action="store_true", help="print one frame, also where it is no terminal")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="default 5")
    add_tls_dir(parser)
    parser.set_defaults(run=top)


def top(arguments: argparse.Namespace) -> int:
    """Show it until the user has enough."""
    if arguments.lb:
        return _watch(arguments, _MetricsSource(arguments))
    with open_channel(arguments.controller, CONTROLLER, arguments.tls_dir) as channel:
        return _watch(arguments, _ControllerSource(arguments, channel))


class _ControllerSource:
    def __init__(self, arguments: argparse.Namespace, channel: grpc.Channel) -> None:
        self._stub = controller_pb2_grpc.ControllerServiceStub(channel)
        self._timeout_s = arguments.timeout_s
        self._title = f"pinyon top  {arguments.controller}"
        self._before: Sample | None = None

    def look(self) -> Draw:
        """What there is now. Raises ``grpc.RpcError`` and :class:`PinyonError`."""
        reply = self._stub.ListRegions(controller_pb2.ListRegionsRequest(), timeout=self._timeout_s)
        before, now = self._before, Sample(time.monotonic(), reply)
        self._before = now
        return lambda width, height: controller_frame(now, before, width, height, self._title)


class _MetricsSource:
    def __init__(self, arguments: argparse.Namespace) -> None:
        base = arguments.lb if "://" in arguments.lb else f"{'https' if arguments.tls_dir else 'http'}://{arguments.lb}"
        self._url = f"{base.rstrip('/')}/metrics"
        self._timeout_s = arguments.timeout_s
        self._tls_dir = arguments.tls_dir
        self._title = f"pinyon top  {base}"
        self._before: tuple[float, dict[str, float]] | None = None

    def look(self) -> Draw:
        """As that of the other source."""
        now_s, now = time.monotonic(), metric_sums(self._page())
        before, self._before = self._before, (now_s, now)
        seconds = 0.0 if before is None else now_s - before[0]
        last = None if before is None else before[1]
        return lambda width, height: metrics_frame(now, last, seconds, width, height, self._title)

    def _page(self) -> str:
        import ssl

        trusted = None
        if self._tls_dir:
            trusted = ssl.create_default_context(cafile=str(Path(self._tls_dir) / "ca.crt"))
        try:
            with urllib.request.urlopen(self._url, timeout=self._timeout_s, context=trusted) as reply:
                page: bytes = reply.read(PAGE_BYTES_MAX)
        except (OSError, ValueError) as error:
            raise Unavailable(f"{self._url}: {getattr(error, 'reason', error)}") from None
        return page.decode(errors="replace")


def metric_sums(page: str) -> dict[str, float]:
    """Of a page of Prometheus metrics: what begins with ``pinyon_``, all labels of a name together; of histograms and
    the like, their counts."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.name
                if not name.startswith("pinyon_") or name.endswith(("_bucket", "_sum", "_created", "_info")):
                    continue
                if name.endswith("_count"):
                    name = f"{name}_total"
                sums[name] = sums.get(name, 0.0) + sample.value
    except ValueError as error:
        raise Unavailable(f"this is no page of metrics: {error}") from None
    return sums


def _watch(arguments: argparse.Namespace, source: _ControllerSource | _MetricsSource) -> int:
    if arguments.once or not sys.stdout.isatty():
        size = shutil.get_terminal_size((COLUMNS_OF_A_PIPE, ROWS_OF_A_PIPE))
        rows = ROWS_OF_A_PIPE  # nothing is left out for want of rows: it may scroll
        for line in source.look()(size.columns, rows):
            sys.stdout.write(f"{line.text}\n")
        return 0
    with _screen(sys.stdout, sys.stdin) as keys:
        draw: Draw | None = None
        failure = ""
        while True:
            try:
                draw, failure = source.look(), ""
            except grpc.RpcError as error:
                failure = f"{error.code().name}: {error.details()}"
            except PinyonError as error:
                failure = error.message
            if not _show_until(time.monotonic() + max(LOOK_S, arguments.every_s), draw, failure, keys):
                return 0


def _show_until(until_s: float, draw: Draw | None, failure: str, keys: int) -> bool:
    """Draw it, and anew when the window has another size. False: the user has enough."""
    shown = None
    while True:
        size = shutil.get_terminal_size()
        if size != shown:
            shown = size
            lines = [] if draw is None else draw(size.columns, size.lines - bool(failure))
            if failure:
                lines = [Line(f"no answer: {failure}"[: size.columns], "red"), *lines]
            sys.stdout.write(screen_of(lines))
            sys.stdout.flush()
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return True
        if keys < 0:
            time.sleep(min(LOOK_S, left_s))
        elif select.select([keys], [], [], min(LOOK_S, left_s))[0]:
            typed = os.read(keys, 64)
            if not typed or b"q" in typed.lower():
                return False


def screen_of(lines: list[Line]) -> str:
    """Written over what is there, so that nothing flickers."""
    drawn = [
        f"{_STYLES[line.style]}{line.text}{_PLAIN}{_REST_OF_LINE}" if line.style else f"{line.text}{_REST_OF_LINE}"
        for line in lines
    ]
    return _HOME + "\r\n".join(drawn) + _REST_OF_SCREEN


@contextmanager
def _screen(out: TextIO, keyboard: TextIO) -> Iterator[int]:
    """The terminal for a while; gives the descriptor that keys come from, or -1."""
    import termios
    import tty

    keys = keyboard.fileno() if keyboard.isatty() else -1
    before = termios.tcgetattr(keys) if keys >= 0 else None
    try:
        if keys >= 0:
            tty.setcbreak(keys)  # Ctrl-C goes on being a signal
        out.write(_ENTER)
        yield keys
    finally:
        out.write(_LEAVE)
        out.flush()
        if before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
