"""The ``pinyon transfer serve`` and ``bench`` commands: they measure the speed between two hosts, and NIC use."""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from rich.console import Console

from pinyon.api.common.v1 import common_pb2
from pinyon.cli.called import called_as
from pinyon.cli.tables import table
from pinyon.core.errors import InvalidArgument
from pinyon.messages.segment import segment_from_proto, segment_to_proto
from pinyon.runtime.identity import WORKER
from pinyon.runtime.security import load_security
from pinyon.runtime.transfer_engine import TransferSettings, start_transfer_engine
from pinyon.transfer import (
    InvalidTransfer,
    Opcode,
    SegmentDescriptor,
    TransferEngine,
    TransferRequest,
    TransferResult,
    TransferStats,
)

_MAX_TOKEN_CHARS = 1 << 20
_MAX_DESCRIPTOR_BYTES = 8 << 20
_MAX_BATCH = 65536
_MAX_SECONDS = 3600.0
_START_S = 60.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SERVE = """\
Register memory and serve it until Ctrl-C, so that "pinyon transfer bench" on another host can measure the way here.
Prints a target on stdout: addresses and the key to this memory. Treat the target as a password while this runs."""
_BENCH = """\
Measure transfers to a target that "pinyon transfer serve" printed: throughput, latency, and what each NIC carried.
Without a target both ends are on this host, in two processes."""


def add_command(commands: Any) -> None:
    group = commands.add_parser("transfer", help="measure the transfer engine between two hosts")
    verbs = group.add_subparsers(dest="verb", required=True)

    serve = verbs.add_parser("serve", help="offer memory to a bench on another host", description=_SERVE)
    serve.add_argument("--memory", default="256M", metavar="SIZE", help="size of the memory (default 256M)")
    serve.add_argument("--seconds", type=float, default=_MAX_SECONDS, help="end after this time (default 3600)")
    serve.set_defaults(run=_serve)

    bench = verbs.add_parser("bench", help="move bytes and show how fast", description=_BENCH)
    bench.add_argument("target", nargs="?", default="", help='what serve printed; "-" reads it from stdin')
    bench.add_argument("--op", choices=("read", "write", "both"), default="both", help="which transfers (default both)")
    bench.add_argument(
        "--size",
        default="4K,64K,1M,16M",
        metavar="LIST",
        help="sizes of a request, one line of the table for each (default 4K,64K,1M,16M)",
    )
    bench.add_argument("--batch", type=int, default=1, help="requests at a time (default 1)")
    bench.add_argument("--seconds", type=float, default=2.0, help="time per line of the table (default 2)")
    bench.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    bench.set_defaults(run=_bench)

    for parser in (serve, bench):
        parser.add_argument(
            "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default 127.0.0.1:0: a free port"
        )
        for name, option in _SETTINGS.items():
            field = TransferSettings.model_fields[name]
            flag: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
            parser.add_argument(option, dest=name, default=None, metavar="VALUE", help=field.description, **flag)


_NAMES = (
    *("advertise_host", "transfer_transports", "transfer_nics", "transfer_topology", "transfer_allow_shm"),
    *("tls_dir", "cluster_secret_file", "transfer_checksum", "transfer_spin_us"),
)
_SETTINGS = {name: "--" + name.removeprefix("transfer_").replace("_", "-") for name in _NAMES}
"""The settings that a bench has as options."""


def _engine(arguments: argparse.Namespace) -> TransferEngine:
    given = {name: value for name in _SETTINGS if (value := getattr(arguments, name)) is not None}
    # The offered memory holds no data, so the user decides where it listens.
    try:
        settings = TransferSettings(transfer_listen=arguments.listen, allow_insecure=True, **given)
    except ValueError as error:
        raise InvalidArgument(str(error), field="settings") from None
    try:
        security = load_security(settings)
    except InvalidArgument as error:
        raise InvalidArgument(settings.in_words(error, WORKER), field=error.field) from None
    return start_transfer_engine(settings, security)


def parse_size(text: str) -> int:
    """Returns a size such as ``64K``, ``1MiB`` or ``4096`` in bytes. Raises InvalidArgument for other text or none."""
    match = re.fullmatch(r"([0-9]{1,15})([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None or not int(match[1]):
        raise InvalidArgument(f"{text!r} is not a size, such as 64K or 1M", field="size")
    return int(match[1]) * _UNITS[match[2]]


def size_text(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def pack_target(segment: SegmentDescriptor) -> str:
    """Returns the segment as one word for the command line."""
    packed = zlib.compress(segment_to_proto(segment).SerializeToString(), 9)
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_target(word: str) -> SegmentDescriptor:
    """Returns the segment in a word from :func:`pack_target`. Raises InvalidArgument for other words or no region."""
    word = word.strip()
    if len(word) > _MAX_TOKEN_CHARS:
        raise InvalidTransfer("the target is too long", field="target")
    try:
        packed = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, _MAX_DESCRIPTOR_BYTES)
        if not unpacker.eof:
            raise ValueError("the end of the word is missing")
        segment = segment_from_proto(common_pb2.Segment.FromString(data))
    except (binascii.Error, zlib.error, DecodeError, ValueError):
        raise InvalidTransfer(
            'not a target; copy the whole word that "transfer serve" printed', field="target"
        ) from None
    if not segment.regions:
        raise InvalidTransfer("the target offers no memory", field="target")
    return segment


# ---------------------------------------------------------------- serve


def _serve(arguments: argparse.Namespace) -> int:
    nbytes = parse_size(arguments.memory)
    _within("seconds", arguments.seconds, _MAX_SECONDS * 24)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.closing(_engine(arguments)) as engine:
        region = engine.register_local_memory(_memory(nbytes))
        sys.stdout.write(f"{pack_target(engine.descriptor([region]))}\n")
        sys.stdout.flush()
        sys.stderr.write(
            f"{size_text(nbytes)} offered; measure from another host: {called_as()} transfer bench TARGET "
            f"(the word above)\nCtrl-C ends; at the latest in {arguments.seconds:.0f} s\n"
        )
        stop.wait(arguments.seconds)
        stats = engine.stats()
    sys.stderr.write(f"peers read {stats.served_read_bytes} and wrote {stats.served_written_bytes} bytes\n")
    return 0


def _memory(nbytes: int) -> memoryview:
    """Returns memory whose pages have been touched, so that the first transfer does not pay for page faults."""
    return np.ones(nbytes, np.uint8).data


def _within(name: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise InvalidArgument(f"--{name} must be over 0 and at most {most:g}", field=name)


# ---------------------------------------------------------------- bench


class _Point(NamedTuple):
    op: str
    request_bytes: int
    batch: int
    transfers: int
    gb_s: float
    p50_us: float
    p99_us: float


def _bench(arguments: argparse.Namespace) -> int:
    sizes = [parse_size(text) for text in arguments.size.split(",")]
    _within("seconds", arguments.seconds, _MAX_SECONDS)
    _within("batch", arguments.batch, _MAX_BATCH)
    opcodes = {"read": [Opcode.READ], "write": [Opcode.WRITE], "both": [Opcode.WRITE, Opcode.READ]}[arguments.op]
    with contextlib.ExitStack() as stack:
        if arguments.target:
            segment = parse_target(sys.stdin.readline() if arguments.target == "-" else arguments.target)
        else:
            segment = stack.enter_context(_own_peer(max(sizes) * arguments.batch, arguments))
        if max(sizes) > segment.regions[0].length:
            raise InvalidArgument(f"the target offers {size_text(segment.regions[0].length)}", field="size")
        engine = stack.enter_context(contextlib.closing(_engine(arguments)))
        region = engine.register_local_memory(_memory(min(max(sizes) * arguments.batch, 1 << 30)))
        points = []
        for opcode in opcodes:
            for size in sizes:
                sys.stderr.write(f"{opcode.name.lower()} {size_text(size)} x {arguments.batch} ...\n")
                requests = _requests(opcode, region.key, region.length, segment, size, arguments.batch)
                points.append(_measure(engine, requests, arguments.seconds))
        stats = engine.stats()
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(points, stats)) + "\n")
    else:
        _show(points, stats)
    return 0


@contextlib.contextmanager
def _own_peer(nbytes: int, arguments: argparse.Namespace) -> Iterator[SegmentDescriptor]:
    """Yields the target of a second process on this host, which serves as much memory as is needed."""
    command = [sys.executable, "-m", "pinyon.cli", "transfer", "serve", "--memory", str(min(nbytes, 1 << 30))]
    for name, option in _SETTINGS.items():
        value = getattr(arguments, name)
        if value is not None and name != "transfer_transports":
            command += [option, value]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    late = threading.Timer(_START_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        word = process.stdout.readline()
        late.cancel()
        if not word:
            *_, last = process.stderr.read().strip().splitlines() or ["no message"]
            raise InvalidArgument(f"the other process did not start: {last}", field="target")
        yield parse_target(word)
    finally:
        late.cancel()
        process.terminate()
        try:
            process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _requests(
    opcode: Opcode, key: bytes, length: int, segment: SegmentDescriptor, size: int, batch: int
) -> list[TransferRequest]:
    """Returns requests whose places follow one another at both ends, from the start again when the memory ends."""
    there = segment.regions[0]
    here_slots, there_slots = length // size, there.length // size
    return [
        TransferRequest(
            opcode, key, (index % here_slots) * size, segment, there.key, (index % there_slots) * size, size
        )
        for index in range(batch)
    ]


def _measure(engine: TransferEngine, requests: Sequence[TransferRequest], seconds: float) -> _Point:
    """Runs transfers one after another for ``seconds``. The first few are not counted, because they pair endpoints."""
    for _ in range(3):
        _all_ok(engine.transfer(requests))
    times: list[float] = []
    begun = last = time.perf_counter()
    while last - begun < seconds:
        results = engine.transfer(requests)
        now = time.perf_counter()
        times.append(now - last)
        last = now
        _all_ok(results)
    nbytes = sum(request.length for request in requests)
    times.sort()
    return _Point(
        requests[0].opcode.name.lower(),
        requests[0].length,
        len(requests),
        len(times),
        nbytes * len(times) / (last - begun) / 1e9,
        times[len(times) // 2] * 1e6,
        times[min(len(times) - 1, len(times) * 99 // 100)] * 1e6,
    )


def _all_ok(results: Sequence[TransferResult]) -> None:
    for result in results:
        if not result.ok:
            raise InvalidArgument(f"a transfer ended as {result.status.value}: {result.reason.name.lower()}")


def _as_json(points: Sequence[_Point], stats: TransferStats) -> dict[str, Any]:
    paths = [
        one.path._asdict() | {"bytes": one.nbytes, "chains": one.chains, "short": one.short, "failures": one.failures}
        for one in stats.paths
    ]
    return {"points": [point._asdict() for point in points], "paths": paths, "retries": stats.retries}


def _show(points: Sequence[_Point], stats: TransferStats) -> None:
    console = Console()
    rows = [
        (
            *(point.op, size_text(point.request_bytes), str(point.batch), f"{point.gb_s:.3f}"),
            *(f"{point.p50_us:.0f}", f"{point.p99_us:.0f}", str(point.transfers)),
        )
        for point in points
    ]
    columns: tuple[str, ...] = ("op", "request", "batch", "GB/s", "p50 us", "p99 us", "transfers")
    console.print(table(columns, rows, right=columns[1:], whole=True))
    total = sum(one.nbytes for one in stats.paths) or 1
    paths = [
        (
            *(one.path.transport, one.path.local_nic or "-", one.path.remote_nic or "-", f"{one.nbytes / 1e9:.2f}"),
            *(f"{one.nbytes / total:.0%}", str(one.chains), str(one.short)),
            ", ".join(f"{count} {reason}" for reason, count in sorted(one.failures.items())) or "none",
        )
        for one in sorted(stats.paths, key=lambda one: -one.nbytes)
    ]
    columns = ("transport", "NIC here", "NIC there", "GB", "share", "chains", "short way", "failures")
    console.print(table(columns, paths, "\npaths", right=columns[3:], whole=True))
    if stats.retries:
        console.print(f"{stats.retries} chains were sent again")
