"""A system under measurement: two processes on loopback that are told what to move, and asked what it took."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from bench.transfer_side import INITIATOR, TARGET, WRITE, Plan

ROOT = Path(__file__).resolve().parent.parent
ANSWER_S = 60.0


@dataclass(frozen=True)
class System:
    """A system to measure: the module of its sides, and the option they get."""

    name: str
    label: str
    module: str
    option: str
    large_only: bool = False
    """The system is measured from 1 MiB up, since what it adds, it adds to many bytes."""
    in_quick: bool = True
    processes: int = 2


class SystemFailed(Exception):
    """A side ended, did not answer in time, or bytes were wrong; the text says which."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C and SIGTERM for work that has bounds of its own. It must be used in the main thread."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Side:
    """One process, which answers commands in JSON lines."""

    def __init__(
        self, python: Path, system: System, role: str, nbytes: int, address: Any, log: Path, src: Path
    ) -> None:
        self._log = log
        self._rest = b""
        with log.open("wb") as stderr:
            arguments = [role, str(nbytes), system.option, json.dumps(address), str(os.getpid())]
            self._process = subprocess.Popen(
                [str(python), "-m", system.module, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(src), str(ROOT)))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
            )

    def answer(self, within_s: float = ANSWER_S) -> dict[str, Any]:
        stream: IO[bytes] = self._process.stdout  # type: ignore[assignment]
        deadline = time.monotonic() + within_s
        while b"\n" not in self._rest:
            if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SystemFailed(f"no answer within {within_s:g} s")
            data = os.read(stream.fileno(), 65536)
            if not data:
                lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
                raise SystemFailed(f"ended: {lines[-1]}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            raise SystemFailed(answer["unavailable"])
        return answer

    def ask(self, within_s: float = ANSWER_S, **command: Any) -> dict[str, Any]:
        stream: IO[bytes] = self._process.stdin  # type: ignore[assignment]
        with contextlib.suppress(BrokenPipeError):  # the missing answer says why
            stream.write(json.dumps(command).encode() + b"\n")
        return self.answer(within_s)

    def stop(self) -> None:
        """Stops all its threads until ``go_on``: some systems poll while they are idle."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Sample:
    """One repetition of one system at one point."""

    throughput_gb_s: float
    p50_us: float
    p99_us: float
    cpu_s_per_gb: float
    gigabytes: float
    """The gigabytes moved, fewer than planned where the time was up."""


class Pair:
    """A system's processes. They are stopped except while they are measured, so that none takes another's cores."""

    def __init__(self, system: System, python: Path, nbytes: int, logs: Path, src: Path = ROOT / "src") -> None:
        """Starts the first process; ``introduce`` and ``ready`` follow when needed. ``src`` has pinyon, in Python or
        compiled."""
        self._system = system
        self._nbytes = nbytes
        self._where = python, logs, src
        self._sides: dict[str, Side] = {}
        self._stopped = False
        self._start(TARGET if system.processes == 2 else INITIATOR, {})

    def _start(self, role: str, address: Any) -> None:
        python, logs, src = self._where
        log = logs / f"{self._system.name}-{role}.log"
        self._sides[role] = Side(python, self._system, role, self._nbytes, address, log, src)

    def introduce(self) -> None:
        """Waits for the target and starts the initiator with its address. Raises :class:`SystemFailed`."""
        if INITIATOR not in self._sides:
            self._start(INITIATOR, self._sides[TARGET].answer()["address"])

    def ready(self) -> None:
        """Waits until the system can be measured. Raises :class:`SystemFailed`."""
        self.introduce()
        if not self._stopped:
            self._sides[INITIATOR].answer()
            self._stop()

    def _ask(self, memory: str, **command: Any) -> dict[str, Any]:
        side = self._sides.get(memory) or self._sides[INITIATOR]
        return side.ask(memory=memory, **command)

    def _stop(self) -> None:
        self._stopped = True
        for side in self._sides.values():
            side.stop()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Lets the processes run."""
        self.ready()
        for side in self._sides.values():
            side.go_on()
        try:
            yield
        finally:
            self._stop()

    def measure(self, plan: Plan, seed: int, verify: bool) -> Sample:
        """Moves what the plan says, once; ``seed`` is of the bytes. Raises :class:`SystemFailed`."""
        with self.awake():
            return self._measure(plan, seed, verify)

    def _measure(self, plan: Plan, seed: int, verify: bool) -> Sample:
        source, destination = (INITIATOR, TARGET) if plan.opcode == WRITE else (TARGET, INITIATOR)
        self._ask(source, do="fill", seed=seed, nbytes=min(plan.nbytes, self._nbytes))
        target = self._sides.get(TARGET)
        before = target.ask(do="cpu")["cpu_s"] if target else 0.0
        ran = self._ask(INITIATOR, within_s=plan.limit_s + ANSWER_S, do="run", plan=asdict(plan))
        cpu_s = ran["cpu_s"] + (target.ask(do="cpu")["cpu_s"] - before if target else 0.0)
        if verify:
            wrong = self._ask(destination, do="verify", plan=asdict(plan), calls=ran["calls"], seed=seed)["wrong"]
            if wrong:
                raise SystemFailed(f"{wrong} blocks of {plan} did not arrive")
        gigabytes = plan.size * plan.batch * ran["calls"] / 1e9
        return Sample(gigabytes / ran["seconds"], ran["p50_us"], ran["p99_us"], cpu_s / gigabytes, gigabytes)

    def close(self) -> None:
        with uninterrupted():
            for side in reversed(self._sides.values()):
                side.close()
