"""The command ``pinyon trace record``, which writes served requests as a trace that may be published."""

from __future__ import annotations

import argparse
import queue
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

import grpc

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.cli.channel import add_tls_dir, open_channel
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
MESSAGES_MAX = 64
"""The bound on messages read but not yet written. Beyond it load balancers wait, and after a while omit requests."""
POLL_S = 0.2
BEGIN_S = 10.0
"""The time in s within which a load balancer must begin."""

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
        with ExitStack() as stack:
            stack.enter_context(_one_interrupt())
            folder = None if out == Path("-") else out.parent
            # opened now: a failure must not come after hours
            spool = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            channels = [stack.enter_context(open_channel(address, LB, arguments.tls_dir)) for address in addresses]
            streams = stack.enter_context(closing(_Streams(addresses, channels, arguments.tls_dir)))
            times, ended = _spool(streams, spool, arguments.seconds, arguments.requests)
            _ignore_interrupts()
            streams.close()
            for reason in ended:
                sys.stderr.write(f"pinyon: {reason}\n")
            _write(spool, times, out)
    except OSError as error:
        raise FailedPrecondition(f"cannot write {out}: {error.strerror or error}") from None
    dropped = sum(streams.dropped)
    said = f"{len(times)} requests of {len(addresses)} load balancer{'s'[: len(addresses) > 1]} in {out}"
    if dropped:
        said += f"; {dropped} were left out: this command was too slow for them"
    sys.stderr.write(f"pinyon: {said}\n")
    return 1 if ended or dropped else 0


class _Streams:
    """The messages of several load balancers, in the order of arrival, with a thread for each.

    All of them have begun recording when the object is made; otherwise it raises the :class:`PinyonError` of one that
    did not.
    """

    def __init__(self, addresses: Sequence[str], channels: Sequence[grpc.Channel], tls_dir: str) -> None:
        self._addresses, self._tls_dir = addresses, tls_dir
        self._news: queue.Queue[tuple[int, admin_pb2.RecordResponse | str]] = queue.Queue(MESSAGES_MAX)
        self._closed = threading.Event()
        self.dropped = [0] * len(addresses)
        # the same for all load balancers; nobody keeps it
        request = admin_pb2.RecordRequest(salt=secrets.token_bytes(32))
        self._calls = [admin_pb2_grpc.AdminServiceStub(channel).Record(request) for channel in channels]
        try:
            for address, call in zip(addresses, self._calls, strict=True):
                _begun(address, call, tls_dir)
        except BaseException:
            self._cancel()
            raise
        self._threads = [
            threading.Thread(target=self._read, args=(number, call), name=f"record {address}", daemon=True)
            for number, (address, call) in enumerate(zip(addresses, self._calls, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int, call: Any) -> None:
        said: admin_pb2.RecordResponse | str = f"{self._addresses[number]} ended it"
        try:
            for message in call:
                self._put(number, message)
        except grpc.RpcError as error:
            said = _failure(error, self._addresses[number], self._tls_dir).message
        self._put(number, said)

    def _put(self, number: int, news: admin_pb2.RecordResponse | str) -> None:
        while not self._closed.is_set():
            try:
                return self._news.put((number, news), timeout=POLL_S)
            except queue.Full:
                continue

    def take(self, timeout_s: float) -> Sequence[admin_pb2.RecordedRequest] | str:
        """Returns requests, none after the timeout, or the reason why a load balancer will send no more."""
        try:
            number, news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return ()
        if isinstance(news, str):
            return news
        self.dropped[number] = news.dropped
        return news.requests

    def close(self) -> None:
        self._closed.set()
        self._cancel()
        for thread in self._threads:
            thread.join()

    def _cancel(self) -> None:
        for call in self._calls:
            call.cancel()


def _begun(address: str, call: Any, tls_dir: str) -> None:
    late = threading.Timer(BEGIN_S, call.cancel)
    late.daemon = True
    late.start()
    try:
        next(call)
    except StopIteration:
        raise NotFound(f"{address} records nothing") from None
    except grpc.RpcError as error:
        raise _failure(error, address, tls_dir) from None
    finally:
        late.cancel()


def _failure(error: grpc.RpcError, address: str, tls_dir: str) -> PinyonError:
    """Returns the error with the load balancer's name, as there may be several."""
    told = plainly(error, LB, address, tls_dir)
    return told if address in told.message else error_from_code(told.grpc_code, f"{address}: {told.message}")


def _spool(
    streams: _Streams, spool: IO[bytes], seconds: float, requests: int
) -> tuple[list[tuple[float, int]], list[str]]:
    """Writes rows as they come; returns their times and places in the spool, and why load balancers ended early."""
    numbers = Renumbering()
    times: list[tuple[float, int]] = []
    ended: list[str] = []
    began_s = time.monotonic()
    try:
        with bar("recording", int(seconds) or requests) as progress:
            while len(times) < requests and len(ended) < len(streams.dropped):
                elapsed_s = time.monotonic() - began_s
                if seconds and elapsed_s >= seconds:
                    break
                news = streams.take(min(POLL_S, seconds - elapsed_s) if seconds else POLL_S)
                if isinstance(news, str):
                    ended.append(news)
                    continue
                for told in news[: requests - len(times)]:
                    row = numbers.row(Recorded(*(getattr(told, name) for name in Recorded._fields)))
                    at = spool.tell()
                    spool.write(line_of(row).encode())
                    times.append((row.time_s, at))  # last, as Ctrl-C may come anywhere
                progress(int(elapsed_s) if seconds else len(times))
    except KeyboardInterrupt:
        pass  # Ctrl-C is the way to end it
    except (InvalidArgument, ResourceExhausted) as error:
        ended.append(error.message)
    return times, ended


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end the recording once, so that a second one loses nothing; it stays ignored, as the process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        _ignore_interrupts()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _ignore_interrupts() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _write(spool: IO[bytes], times: list[tuple[float, int]], out: Path) -> None:
    """Writes the rows in order of arrival, with times since the first; the spool has them in order of their ends."""
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
