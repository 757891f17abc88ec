"""The ``pinyon top`` command: regions, load balancers and instances as they are, second by second."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.cli.channel import CONDUCTOR_ADDRESS, add_timeout, add_tls_dir, check_address, open_channel, trusted
from pinyon.cli.regions import CONTROLLER_ADDRESS
from pinyon.cli.top_frame import (
    ControllerSample,
    SuiteSample,
    controller_frame,
    door_of,
    fit,
    metrics_frame,
    pinyon_samples,
    plain,
    suite_frame,
)
from pinyon.core.errors import PinyonError, Unavailable
from pinyon.runtime.identity import CONDUCTOR, CONTROLLER

LB_ADDRESS = "127.0.0.1:8000"
LOOK_S = 0.1
"""The seconds between two checks of the keyboard and the window's size."""
PAGE_BYTES_MAX = 16 << 20
REFUSAL_BYTES_MAX = 64 << 10
SAMPLES_MAX = 1024
"""The samples kept: those of the last minute, or of less where looks are close together."""
ROWS_OF_A_PIPE = 1000
COLUMNS_OF_A_PIPE = 200

_DESCRIPTION = """\
A live view of one suite, from its conductor and a load balancer: tokens and requests per second, how much of the
prompts was reused (HITS), percentiles of the time to first token and between tokens, and the instances. Percentiles
are of requests that have ended; TBT is the mean of each.

Where a controller answers, of its regions: of each load balancer the requests that wait (QUEUE) and those under way
(FLIGHT; one that was forwarded counts at both load balancers), how many of its instances could take a request at once
(FREE), requests per second that are forwarded to other regions (OUT) and taken from them (IN), and the clusters whose
instances it serves; then the instances, the busiest first. "adopted" are clusters whose own load balancers are all
gone: one of another region serves them meanwhile, marked with a star.

With --metrics, all metrics of one process by name. "q" or Ctrl-C ends it."""

Look = Callable[[], tuple[list[Text], Sequence[str]]]
"""A function that takes a sample and returns its lines, and the failures of those that did not answer, though others
did. It raises :class:`PinyonError` if nobody did."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch load, latencies and instances, live",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--conductor", default="", metavar="HOST:PORT", help=f"its gRPC (default {CONDUCTOR_ADDRESS})")
    add("--lb", default="", metavar="ADDRESS", help=f"its HTTP: host:port or https://... (default {LB_ADDRESS})")
    add(
        "--controller",
        default="",
        metavar="HOST:PORT",
        help=f"show its regions (default {CONTROLLER_ADDRESS}, if one answers there and neither --conductor nor --lb "
        "is given)",
    )
    add("--metrics", default="", metavar="ADDRESS", help="show the metrics of this process, by name")
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between two looks (default 1)")
    parser.add_argument(
        "--once", action="store_true", help="print one frame and end; exit status 1 if one did not answer"
    )
    add_timeout(parser)
    add_tls_dir(parser)
    parser.set_defaults(run=top)


def top(arguments: argparse.Namespace) -> int:
    """Shows the view until the user ends it."""
    if arguments.metrics:
        return _watch(arguments, _metrics(arguments))
    regions, suite = _regions(arguments), _suite(arguments)
    if arguments.controller:
        return _watch(arguments, regions)
    if arguments.conductor or arguments.lb:
        return _watch(arguments, suite)
    try:
        regions()
    except PinyonError:
        return _watch(arguments, suite)
    return _watch(arguments, regions)


def _regions(arguments: argparse.Namespace) -> Look:
    """Returns the way to look at the regions of a controller."""
    address = arguments.controller or CONTROLLER_ADDRESS
    check_address(address)
    samples: deque[ControllerSample] = deque(maxlen=2)

    def look() -> tuple[list[Text], Sequence[str]]:
        with open_channel(address, CONTROLLER, arguments.tls_dir) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            reply = stub.ListRegions(controller_pb2.ListRegionsRequest(), timeout=arguments.timeout_s)
        samples.append(ControllerSample(time.monotonic(), reply))
        return controller_frame(samples[-1], samples[0], f"pinyon top  {address}"), ()

    return look


def _suite(arguments: argparse.Namespace) -> Look:
    """Returns the way to look at a conductor and a load balancer."""
    conductor = arguments.conductor or CONDUCTOR_ADDRESS
    check_address(conductor)  # checked here, because the load balancer may answer all the same
    page = _Page(arguments.lb or LB_ADDRESS, arguments)
    kept: deque[SuiteSample] = deque(maxlen=SAMPLES_MAX)

    def look() -> tuple[list[Text], Sequence[str]]:
        door, instances = None, None
        failures = []
        try:
            with open_channel(conductor, CONDUCTOR, arguments.tls_dir) as channel:
                stub = conductor_pb2_grpc.ConductorServiceStub(channel)
                reply = stub.ListInstances(conductor_pb2.ListInstancesRequest(), timeout=arguments.timeout_s)
                instances = list(reply.instances)
        except PinyonError as error:
            failures.append(error.message)
        try:
            door = door_of(page.read())
            if "pinyon_lb_conductor_connected" not in door.values:  # servers of other makers have no conductor
                failures.clear()
        except PinyonError as error:
            failures.append(error.message)
        if door is None and instances is None:
            raise Unavailable("; ".join(failures))
        kept.append(SuiteSample(time.monotonic(), door, instances, tuple(failures)))
        return suite_frame(kept, f"pinyon top  {conductor}  {page.base}"), failures

    return look


def _metrics(arguments: argparse.Namespace) -> Look:
    """Returns the way to look at the metrics of one process."""
    page = _Page(arguments.metrics, arguments)
    samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=2)

    def look() -> tuple[list[Text], Sequence[str]]:
        samples.append((time.monotonic(), metric_sums(page.read())))
        (before_s, before), (now_s, now) = samples[0], samples[-1]
        return metrics_frame(now, before, now_s - before_s, f"pinyon top  {page.base}"), ()

    return look


class _Page:
    """The metrics of a process, over HTTP."""

    def __init__(self, address: str, arguments: argparse.Namespace) -> None:
        if "://" not in address:
            check_address(address)
        self.base = address if "://" in address else f"{'https' if arguments.tls_dir else 'http'}://{address}"
        self._url = f"{self.base.rstrip('/')}/metrics"
        self._timeout_s = arguments.timeout_s
        self._tls_dir = arguments.tls_dir
        if self._tls_dir:
            trusted(self._tls_dir)  # checked here once, else each source would say so

    def read(self) -> str:
        """Reads the page. Raises :class:`PinyonError`."""
        until_s = time.monotonic() + self._timeout_s
        context = trusted(self._tls_dir) if self._tls_dir else None
        try:
            with urllib.request.urlopen(self._url, timeout=self._timeout_s, context=context) as reply:
                page = b""
                while (part := reply.read1(1 << 16)) and len(page) < PAGE_BYTES_MAX:
                    page += part
                    if time.monotonic() > until_s:  # the socket's timeout is for each part
                        raise TimeoutError("timed out")
        except urllib.error.HTTPError as error:
            with error:
                raise Unavailable(f"{self._url}: {_refusal(error.read(REFUSAL_BYTES_MAX)) or error}") from None
        except HTTPException:
            raise Unavailable(
                f"no metrics at {self._url}: what answers there speaks no HTTP (a port of gRPC, or of HTTPS?)"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            said = getattr(reason, "strerror", None) or reason
            raise Unavailable(f"no metrics at {self._url}: {said}") from None
        return page.decode(errors="replace")


def _refusal(body: bytes) -> str:
    """Returns a load balancer's message in a refusal, or an empty text."""
    try:
        return plain(str(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def metric_sums(page: str) -> dict[str, float]:
    """Returns the values whose names begin with ``pinyon_``, summed over labels, from a page of Prometheus metrics.

    Histograms and the like give their counts. Raises :class:`Unavailable`."""
    sums: dict[str, float] = {}
    for sample in pinyon_samples(page):
        name = sample.name
        if name.endswith(("_bucket", "_sum", "_created", "_info")):
            continue
        if name.endswith("_count"):
            name = f"{name}_total"
        sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def _watch(arguments: argparse.Namespace, look: Look) -> int:
    lines, failures = look()  # if nobody answers, it ends here, and not with an empty screen
    every_s = max(LOOK_S, arguments.every_s)
    console = Console()
    if arguments.once or not (sys.stdout.isatty() and console.is_interactive):
        size = shutil.get_terminal_size((COLUMNS_OF_A_PIPE, ROWS_OF_A_PIPE))
        time.sleep(every_s)  # rates need two looks
        lines, failures = look()
        for line in fit(lines, size.columns, ROWS_OF_A_PIPE):  # no row is left out, because the output may scroll
            sys.stdout.write(f"{line.plain}\n")
        return 1 if failures else 0
    with _keys(sys.stdin) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        failure = ""
        while _show_until(live, time.monotonic() + every_s, lines, failure, keys):
            try:
                (lines, _), failure = look(), ""
            except PinyonError as error:
                failure = error.message
    return 0


def _show_until(live: Live, until_s: float, lines: Sequence[Text], failure: str, keys: int) -> bool:
    """Draws the lines, and anew when the window's size changes. Returns False once the user ends it."""
    drawn_for = None
    while True:
        size = live.console.size
        if size != drawn_for:
            drawn_for = size
            shown = fit(lines, size.width, size.height - bool(failure))
            if failure:
                shown.insert(0, Text(f"no answer: {failure}", "red", no_wrap=True, overflow="crop"))
            live.update(Group(*shown), refresh=True)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return True
        if keys < 0:
            time.sleep(min(LOOK_S, left_s))
        elif select.select([keys], [], [], min(LOOK_S, left_s))[0]:
            typed = os.read(keys, 64)
            if not typed or b"q" in typed.lower():
                return False


@contextmanager
def _keys(keyboard: TextIO) -> Iterator[int]:
    """Yields the descriptor that keys come from one by one, or -1."""
    import termios
    import tty

    if not keyboard.isatty():
        yield -1
        return
    keys = keyboard.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)  # Ctrl-C stays a signal
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
