"""One process of a transfer under measurement: it moves what the controller says, and says what it took.

All systems run this same loop, so they are timed alike. Standard library only: a peer's process runs in the peer's own
environment. Commands come as JSON lines on stdin and are answered on stdout; what a library prints goes to stderr."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.report import percentile

READ, WRITE = "read", "write"
INITIATOR, TARGET = "initiator", "target"
_TILE_BYTES = 1_048_573
"""The pattern's period: a prime, so that blocks of any usual size differ from their neighbours."""
_WARM_UP_BYTES = 1 << 20

Block = tuple[int, int, int]
"""The offsets in the initiator's memory and in the target's, and the length, in bytes."""

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Plan:
    """``count`` calls in one direction, each of ``batch`` blocks of ``size`` bytes."""

    opcode: str
    size: int
    batch: int
    count: int
    seed: int = 1
    limit_s: float = 45.0
    """The time after which no further call begins: the slowest system must not decide how long all take."""

    @property
    def nbytes(self) -> int:
        return self.size * self.batch * self.count


def calls_of(plan: Plan, span: int) -> list[list[Block]]:
    """Returns the blocks of each call: all over ``span`` bytes on both sides, in two random orders, as paged KV lies.

    When the calls need more room than there is they use it again from the start, with the same partners."""
    slots = min(span // plan.size, plan.batch * plan.count)
    slots -= slots % plan.batch
    if slots < plan.batch:
        raise ValueError(f"{plan} does not fit into {span} bytes")
    random_ = random.Random(plan.seed)
    local = list(range(slots))
    remote = list(range(slots))
    random_.shuffle(local)
    random_.shuffle(remote)
    blocks = [(a * plan.size, b * plan.size, plan.size) for a, b in zip(local, remote, strict=True)]
    batches = [blocks[start : start + plan.batch] for start in range(0, slots, plan.batch)]
    return [batches[index % len(batches)] for index in range(plan.count)]


class Unavailable(Exception):
    """The system cannot be measured here; the text says why."""


class Memory:
    """Anonymous memory with huge pages where the kernel has them, every page touched."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        ctypes.memset(self.address, 1, nbytes)

    @staticmethod
    def _pattern(seed: int) -> bytes:
        return random.Random(seed).randbytes(_TILE_BYTES)

    def fill(self, seed: int, nbytes: int) -> None:
        """Writes the pattern of this seed into the first ``nbytes``."""
        tile = self._pattern(seed)
        for start in range(0, nbytes, _TILE_BYTES):
            ctypes.memmove(self.address + start, tile, min(_TILE_BYTES, nbytes - start))

    def holds(self, seed: int, offset: int, source_offset: int, length: int) -> bool:
        """Returns whether these bytes equal the pattern's at ``source_offset``."""
        tile = self._pattern(seed) if seed != self._last[0] else self._last[1]
        self._last = (seed, tile)
        at = ctypes.cast(ctypes.c_char_p(tile), ctypes.c_void_p).value or 0
        while length:
            start = source_offset % _TILE_BYTES
            part = min(length, _TILE_BYTES - start)
            if _libc.memcmp(self.address + offset, at + start, part):
                return False
            offset, source_offset, length = offset + part, source_offset + part, length - part
        return True

    _last: tuple[int, bytes] = (-1, b"")


class Target(Protocol):
    """A side that serves its memory until it is closed."""

    memory: Memory

    def address(self) -> dict[str, Any]:
        """Returns what an initiator needs to reach this target, as plain JSON values."""
        ...

    def close(self) -> None: ...


class Initiator(Protocol):
    """A side that moves blocks between its memory and the target's."""

    memory: Memory

    def prepare(self, opcode: str, blocks: Sequence[Block]) -> Callable[[], None]:
        """Returns the call that moves these blocks, and returns when all have arrived; it raises if they did not."""
        ...

    def others(self) -> dict[str, Memory]:
        """Returns the target's memory under ``TARGET``, where there is no process for it."""
        return {}

    def close(self) -> None: ...


def run(
    target: Callable[[Memory, str], Target] | None, initiator: Callable[[Memory, str, dict[str, Any]], Initiator]
) -> None:
    """Runs the main program of a side: ``ROLE NBYTES OPTION ADDRESS PARENT``. ADDRESS is what the target answered
    first, PARENT the process that started this one, which does not outlive it.

    Without a target, the initiator moves bytes within its own process, and its second memory is the target's."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would not notice its parent's end
    if os.getppid() != int(sys.argv[5]):  # the parent ended before prctl
        sys.exit("the starting process is gone")
    role, nbytes, option = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    answer = _private_stdout()
    memory = Memory(nbytes)
    try:
        if role == "target" and target is not None:
            serving = target(memory, option)
            answer({"address": serving.address()})
            _answer_commands({TARGET: memory}, answer, None)
            serving.close()
        else:
            moving = initiator(memory, option, json.loads(sys.argv[4]))
            answer({})
            _answer_commands({INITIATOR: memory, **moving.others()}, answer, moving)
            moving.close()
    except Unavailable as error:
        answer({"unavailable": str(error)})


def _private_stdout() -> Callable[[dict[str, Any]], None]:
    """Keeps stdout for the answers of the returned function: all other output goes to stderr from here on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        stream.write(json.dumps(value) + "\n")
        stream.flush()

    return answer


def _answer_commands(
    memories: dict[str, Memory], answer: Callable[[dict[str, Any]], None], initiator: Initiator | None
) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("do")
        if kind == "cpu":
            answer({"cpu_s": _cpu_s()})
        elif kind == "fill":
            memories[command["memory"]].fill(command["seed"], command["nbytes"])
            answer({})
        elif kind == "verify":
            where = command["memory"]
            plan = Plan(**command["plan"])
            answer({"wrong": _wrong_blocks(memories[where], plan, command["calls"], command["seed"], where)})
        elif kind == "run" and initiator is not None:
            answer(_timed(initiator, Plan(**command["plan"])))
        else:
            raise ValueError(line)


def _wrong_blocks(memory: Memory, plan: Plan, calls: int, seed: int, where: str) -> int:
    """Returns how many blocks of the plan's first calls do not hold the pattern that the other side has."""
    wrong = 0
    for call in {tuple(blocks) for blocks in calls_of(plan, memory.nbytes)[:calls]}:
        for here, there, length in call:
            at, source = (here, there) if where == INITIATOR else (there, here)
            wrong += not memory.holds(seed, at, source, length)
    return wrong


def _cpu_s() -> float:
    """Returns user and system time of this process so far, all threads, also those that ended."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _beginning(blocks: list[Block]) -> list[Block]:
    """Returns these blocks as far as they fit into the warm-up's bytes."""
    size = blocks[0][2]
    return [(here, there, min(size, _WARM_UP_BYTES)) for here, there, _ in blocks[: max(1, _WARM_UP_BYTES // size)]]


def _timed(initiator: Initiator, plan: Plan) -> dict[str, float]:
    """Prepares all calls, makes one like them but small (cores awake, connections open), then measures each, as many as
    there is time for."""
    prepared: dict[int, Callable[[], None]] = {}
    calls = []
    planned = calls_of(plan, initiator.memory.nbytes)
    for blocks in planned:
        call = prepared.get(id(blocks))
        if call is None:
            call = prepared[id(blocks)] = initiator.prepare(plan.opcode, blocks)
        calls.append(call)
    initiator.prepare(plan.opcode, _beginning(planned[0]))()
    spent: list[int] = []
    cpu_s = _cpu_s()
    last = started = time.perf_counter_ns()
    end = started + int(plan.limit_s * 1e9)
    for call in calls:
        call()
        now = time.perf_counter_ns()
        spent.append(now - last)
        last = now
        if now > end:
            break
    return {
        "calls": len(spent),
        "seconds": (last - started) / 1e9,
        "cpu_s": _cpu_s() - cpu_s,
        "p50_us": percentile(spent, 50) / 1e3,
        "p99_us": percentile(spent, 99) / 1e3,
    }
