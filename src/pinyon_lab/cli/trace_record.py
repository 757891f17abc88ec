"""The command ``pinyon trace record``, which writes served requests as a trace that may be published."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import IO, Any

import grpc

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.cli.channel import add_tls_dir, open_async_channel
from pinyon.cli.failures import plainly
from pinyon.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PinyonError,
    ResourceExhausted,
    error_from_code,
)
from pinyon.runtime.identity import LB
from pinyon_lab.cli.trace_input import bar, positive, whole
from pinyon_lab.traces import FORMATS, TraceRow, TraceWriter
from pinyon_lab.traces.formats import line_of
from pinyon_lab.traces.recording import Recorded, Renumbering, in_sessions

REQUESTS_MAX = 1_000_000
LBS_MAX = 16
POLL_S = 0.2
BEGIN_S = 10.0
"""The time in s within which a load balancer must begin to record."""

_DESCRIPTION = """\
Write what load balancers serve from now on as a trace in pinyon's format: when a request came, its type and turn, the
lengths of prompt and answer, which prompts share a beginning, which requests are of one user or session. Nothing in the
file is computed from a text, a block key or a name: ids are numbers in the order of their coming. Requests that came
before the beginning, had no token, or had not ended at the end are not in it. Ctrl-C ends it; the file is whole then.

With several load balancers (--lb again for each) it is one trace: a prompt has the same ids wherever it went. Times are
those of the hosts' clocks. With TLS it takes an admin's certificate and the address is that of --admin-listen; without,
it works on the load balancer's own host only."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "record",
        help="write what load balancers serve as a trace",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a file, gzipped if it ends in .gz; - is standard output")
    parser.add_argument(
        "--lb",
        action="append",
        metavar="HOST:PORT",
        help=f"a load balancer's gRPC, up to {LBS_MAX} times (default 127.0.0.1:8001)",
    )
    seconds = positive("a number of seconds", 1e7)
    parser.add_argument("--seconds", type=seconds, default=0.0, metavar="S", help="end after this (default: at Ctrl-C)")
    parser.add_argument(
        "--requests",
        type=whole(f"a number from 1 to {REQUESTS_MAX}", 1, REQUESTS_MAX),
        default=REQUESTS_MAX,
        metavar="N",
        help=f"end after so many (default {REQUESTS_MAX})",
    )
    add_tls_dir(parser)
    parser.set_defaults(run=record)


def record(arguments: argparse.Namespace) -> int:
    """Records the trace. Returns 1 if a load balancer ended it or requests were left out."""
    out: Path = arguments.out
    addresses: list[str] = arguments.lb or ["127.0.0.1:8001"]
    if len(addresses) > LBS_MAX or len(set(addresses)) != len(addresses):
        raise InvalidArgument(f"each load balancer once, and at most {LBS_MAX}", field="lb")
    if out.is_dir():
        raise InvalidArgument(f"{out} is a folder", field="out")
    try:
        # opened now: a failure must not come after hours
        with tempfile.TemporaryFile(dir=None if out == Path("-") else out.parent) as spool:
            seen = _LiveTrace(spool, arguments.seconds, arguments.requests)
            asyncio.run(seen.run(addresses, arguments.tls_dir))
            for reason in seen.ended:
                sys.stderr.write(f"pinyon: {reason}\n")
            _write(spool, seen.times, out)
    except OSError as error:
        raise FailedPrecondition(f"cannot write {out}: {error.strerror or error}") from None
    dropped = sum(seen.dropped.values())
    said = f"{len(seen.times)} requests of {len(addresses)} load balancer{'s'[: len(addresses) > 1]} in {out}"
    if dropped:
        said += f"; {dropped} were left out: this command was too slow for them"
    sys.stderr.write(f"pinyon: {said}\n")
    return 1 if seen.ended or dropped else 0


class _LiveTrace:
    """A spool of the rows from several load balancers, in the order of the requests' ends."""

    def __init__(self, spool: IO[bytes], seconds: float, requests: int) -> None:
        self._spool, self._seconds, self._requests = spool, seconds, requests
        self._numbers = Renumbering()
        self.times: list[tuple[float, int]] = []
        """The times of the rows, and their places in the spool."""
        self.ended: list[str] = []
        """The reasons why load balancers ended the recording early."""
        self.dropped: dict[str, int] = {}
        """The number of requests that each load balancer left out."""

    async def run(self, addresses: Sequence[str], tls_dir: str) -> None:
        """Records until Ctrl-C or another end. Raises :class:`PinyonError` if a load balancer does not begin."""
        async with AsyncExitStack() as stack:
            # the same salt for all load balancers; nobody keeps it
            request = admin_pb2.RecordRequest(salt=secrets.token_bytes(32))
            messages: dict[str, AsyncIterator[admin_pb2.RecordResponse]] = {}
            for address in addresses:
                channel = await stack.enter_async_context(open_async_channel(address, LB, tls_dir))
                messages[address] = aiter(admin_pb2_grpc.AdminServiceStub(channel).Record(request))
            for address, each in messages.items():
                await _begun(address, each, tls_dir)
            interrupted = asyncio.Event()
            loop = asyncio.get_running_loop()
            _on_interrupt(lambda *_: loop.call_soon_threadsafe(interrupted.set))
            readers = [asyncio.create_task(self._read(*each, tls_dir)) for each in messages.items()]
            try:
                await self._until(interrupted, readers)
            except (InvalidArgument, ResourceExhausted) as error:
                self.ended.append(error.message)
            _on_interrupt(signal.SIG_IGN)  # a second Ctrl-C must lose nothing; ignored until the process ends
            for reader in readers:
                reader.cancel()

    async def _until(self, interrupted: asyncio.Event, readers: Iterable[asyncio.Task[str]]) -> None:
        """Waits until there are enough rows, time is over, all load balancers have ended it, or Ctrl-C comes."""
        began_s, reading = time.monotonic(), set(readers)
        with bar("recording", int(self._seconds) or self._requests) as progress:
            while reading and len(self.times) < self._requests and not interrupted.is_set():
                elapsed_s = time.monotonic() - began_s
                if self._seconds and elapsed_s >= self._seconds:
                    break
                wait_s = min(POLL_S, self._seconds - elapsed_s) if self._seconds else POLL_S
                done, reading = await asyncio.wait(reading, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                self.ended += [reason for reason in (reader.result() for reader in done) if reason]
                progress(int(elapsed_s) if self._seconds else len(self.times))

    async def _read(self, address: str, messages: AsyncIterator[admin_pb2.RecordResponse], tls_dir: str) -> str:
        """Writes rows as they come. Returns why the load balancer ended the recording; empty if rows suffice."""
        try:
            async for message in messages:
                self.dropped[address] = message.dropped
                for told in message.requests[: self._requests - len(self.times)]:
                    row = self._numbers.row(Recorded(*(getattr(told, name) for name in Recorded._fields)))
                    self.times.append((row.time_s, self._spool.tell()))
                    self._spool.write(line_of(row).encode())
                if len(self.times) >= self._requests:
                    return ""
        except grpc.RpcError as error:
            return _failure(error, address, tls_dir).message
        return f"{address} ended it"


async def _begun(address: str, messages: AsyncIterator[admin_pb2.RecordResponse], tls_dir: str) -> None:
    try:
        async with asyncio.timeout(BEGIN_S):
            await anext(messages)
    except StopAsyncIteration:
        raise NotFound(f"{address} records nothing") from None
    except TimeoutError:
        raise error_from_code("DEADLINE_EXCEEDED", f"the load balancer at {address} did not answer in time") from None
    except grpc.RpcError as error:
        raise _failure(error, address, tls_dir) from None


def _failure(error: grpc.RpcError, address: str, tls_dir: str) -> PinyonError:
    """Returns the error with the load balancer's name, as there may be several."""
    told = plainly(error, LB, address, tls_dir)
    return told if address in told.message else error_from_code(told.grpc_code, f"{address}: {told.message}")


def _on_interrupt(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _write(spool: IO[bytes], times: list[tuple[float, int]], out: Path) -> None:
    """Writes the rows by arrival, with times since the first; in the spool, they are in the order of their ends."""
    if not times:
        raise NotFound("no request came and ended meanwhile: there is no trace")
    parse = FORMATS["qwen"].make()
    times.sort()
    start_s = times[0][0]

    def rows() -> Iterator[TraceRow]:
        for _, at in times:
            spool.seek(at)
            row = parse(spool.readline().decode())
            yield row._replace(time_s=row.time_s - start_s)

    with TraceWriter(out) as writer:
        for row in in_sessions(rows()):
            writer.write(row)
