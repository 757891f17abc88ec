"""The conductor with clocks in it, for ``bench/conductor.py``: a service like any other that shows where its CPU time
goes. The time of the clocks themselves is included, about a microsecond each.

    python -m bench.conductor_timed FILE [options of the conductor]

``FILE`` has a float64 for each of :data:`PARTS`: seconds of CPU of its thread so far. Parts lie within each other: the
decision in the placing, events in reports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.placement.scheduler import Scheduler
from services.conductor import __main__ as service
from services.conductor import app, intake, placing
from services.conductor.intake import Steps

PARTS = (
    "placing", "decision", "request from its message", "placement to its message", "reports", "events", "messages read",
    "messages written",
)  # fmt: skip


class Clocks:
    """The clocks by part, in a file that other processes may read."""

    def __init__(self, file: Path) -> None:
        self._seconds = np.memmap(file, np.float64, "w+", shape=(len(PARTS),))

    def on(self, owner: Any, name: str, part: str) -> None:
        """Measures the function ``name`` of ``owner`` from now on."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        seconds, place = self._seconds, PARTS.index(part)

        def call(*arguments: Any, **named: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return function(*arguments, **named)
            finally:
                seconds[place] += (time.thread_time_ns() - began_ns) * 1e-9

        return call

    def on_steps(self, owner: Any, name: str, part: str) -> None:
        """Measures a function that works in steps, as :meth:`on` does."""
        function, seconds, place = getattr(owner, name), self._seconds, PARTS.index(part)

        def call(*arguments: Any) -> Steps[Any]:
            steps = function(*arguments)
            while True:
                began_ns = time.thread_time_ns()
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
                finally:
                    seconds[place] += (time.thread_time_ns() - began_ns) * 1e-9
                yield

        setattr(owner, name, call)


class TimedMessages:
    """A module of messages, as generated code refers to it, whose reading and writing is timed."""

    def __init__(self, clocks: Clocks, module: Any) -> None:
        self._clocks, self._module = clocks, module

    def __getattr__(self, name: str) -> Any:
        message = getattr(self._module, name)
        return SimpleNamespace(
            FromString=self._clocks.timed(message.FromString, "messages read"),
            SerializeToString=self._clocks.timed(message.SerializeToString, "messages written"),
        )


class TimedScheduler:
    """A scheduler whose decisions are timed."""

    def __init__(self, clocks: Clocks, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.schedule = clocks.timed(self._scheduler.schedule, "decision")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "consider":
            self._scheduler.consider = value
        else:
            super().__setattr__(name, value)


def main(argv: list[str]) -> None:
    clocks = Clocks(Path(argv[0]))
    clocks.on_steps(intake.ReportIntake, "apply", "reports")
    clocks.on_steps(intake.ReportIntake, "_apply_delta", "events")
    clocks.on(placing.Placer, "answer", "placing")
    clocks.on(placing, "request_from_proto", "request from its message")
    clocks.on(placing, "fill_placement", "placement to its message")
    name = next(each for each in vars(conductor_pb2_grpc) if each.endswith("conductor__pb2"))
    setattr(conductor_pb2_grpc, name, TimedMessages(clocks, conductor_pb2))
    # a compiled class does not let its methods be replaced
    vars(app)["Scheduler"] = lambda *arguments: TimedScheduler(clocks, Scheduler(*arguments))
    service.main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
