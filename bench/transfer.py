"""The transfer engine beside Mooncake's and NIXL's and beside the limits: plain sockets, process_vm_readv, memcpy.

Each system is a pair of processes on loopback (memcpy: one process). In a repetition every system moves the same
blocks between memories of the same kind, in an order that rotates; ratios are formed within a repetition. Sources get
new bytes for each repetition, and what arrived is compared once per system and point, outside the timed part.

``--fig12`` is another measurement: Fig. 12 of the Mooncake paper (see ``transfer_fig12``)."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pinyon
from bench import transfer_fig12
from bench.peers import PeerUnavailable, peer_python
from bench.report import Report, parser, progress
from bench.transfer_figures import (
    MIB,
    NIXL_SHM,
    NIXL_TCP,
    OPCODES,
    OURS,
    PEER,
    POINTS,
    SINGLES,
    SYSTEMS,
    Measured,
    aims,
    comparisons,
    draw,
    figures,
    show,
)
from bench.transfer_pair import Pair, System, SystemFailed, uninterrupted
from pinyon.core.compiled import compiled

PICTURES = Path(__file__).resolve().parent / "results"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13"
NIXL = "nixl-cu12==1.5.1"
"""NIXL with its UCX. Its only dependency beside NumPy is PyTorch with CUDA, which it does without on host memory."""
NUMPY = "numpy>=2"


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement: up to ``most`` repetitions of each point, fewer but ``least`` when its share of the
    budget is used up. On a machine so busy that these take longer than ``limit_s``, one each from there on."""

    most: int
    least: int
    budget_s: float
    limit_s: float
    quick: bool


FULL = Effort(most=7, least=5, budget_s=330.0, limit_s=420.0, quick=False)
QUICK = Effort(most=3, least=1, budget_s=45.0, limit_s=45.0, quick=True)


def measure_all(pairs: dict[System, Pair], measured: Measured, effort: Effort, seed: int, started: float) -> None:
    """Fills ``measured``. A system that fails at a point is closed and has no figures from there on."""
    fills = itertools.count(seed * 1_000_003)
    rounds = [(point, opcode) for point in POINTS for opcode in OPCODES]
    for number, (point, opcode) in enumerate(rounds, 1):
        until = started + effort.budget_s * number / len(rounds)
        plan = point.plan(opcode, seed, effort.quick)
        done = 0
        for repetition in range(effort.most):
            wanted = [system for system in pairs if point.nbytes >= MIB or not system.large_only]
            now = time.monotonic()
            least = effort.least if now < started + effort.limit_s else 1
            if not wanted or (repetition >= least and now > until):
                break
            turn = repetition % len(wanted)
            for system in wanted[turn:] + wanted[:turn]:
                try:
                    sample = pairs[system].measure(plan, next(fills), verify=repetition == 0)
                except SystemFailed as error:
                    measured.missing[system.name] = f"{opcode} {point.name}: {error}"
                    pairs.pop(system).close()
                    continue
                measured.samples.setdefault((system.name, opcode, point.name), []).append(sample)
            done += 1
        progress(f"{opcode} {point.label}: {done} repetitions, {time.monotonic() - started:.0f} s so far")


def where_pinyon_is() -> tuple[Path, str]:
    """Returns the folder from which this process imports pinyon, and whether it is compiled."""
    return Path(pinyon.__file__).parents[1], "compiled" if compiled() else "Python"


def python_of(system: System) -> Path:
    """Returns the interpreter that has the system. Raises :class:`PeerUnavailable`."""
    if system == PEER:
        return peer_python(MOONCAKE, "mooncake.engine", "it needs libibverbs1")
    if system in (NIXL_SHM, NIXL_TCP):
        return peer_python(NIXL, "nixl_cu12._api", also=(NUMPY,), alone=True)
    if system == transfer_fig12.GLOO:
        return peer_python(transfer_fig12.TORCH, "torch.distributed", also=(NUMPY,))
    return Path(sys.executable)


def start(
    systems: Iterable[System], nbytes: int, logs: Path, src: Path, pairs: dict[System, Pair], missing: dict[str, str]
) -> None:
    """Fills ``pairs`` with those that can run here, ``missing`` with the reasons of the others. All start at once."""

    def each(step: Callable[[System], None], which: Iterable[System]) -> None:
        for system in which:
            try:
                step(system)
            except (PeerUnavailable, SystemFailed) as error:
                missing[system.name] = str(error)
                progress(f"without {system.label}: {error}")
                if system in pairs:
                    pairs.pop(system).close()

    def begin(system: System) -> None:
        pairs[system] = Pair(system, python_of(system), nbytes, logs, src)

    each(begin, systems)
    each(lambda system: pairs[system].introduce(), list(pairs))
    each(lambda system: pairs[system].ready(), list(pairs))


def close(pairs: dict[System, Pair]) -> None:
    with uninterrupted():
        for pair in pairs.values():
            pair.close()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=[system.name for system in SYSTEMS], help="these systems")
    options.add_argument("--pictures", type=Path, default=PICTURES, help="folder for the SVG files")
    options.add_argument("--fig12", action="store_true", help="Fig. 12 of the Mooncake paper instead")
    options.add_argument(
        "--gigabytes", type=transfer_fig12.gigabytes, nargs="+", help="sizes of --fig12, default 1 4 10 (--quick: 1)"
    )
    arguments = options.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts as Ctrl-C
    src, kind = where_pinyon_is()
    if arguments.fig12:
        transfer_fig12.measure(
            arguments,
            kind,
            lambda systems, nbytes, logs, pairs, missing: start(systems, nbytes, logs, src, pairs, missing),
            close,
        )
        return
    effort = QUICK if arguments.quick else FULL
    wanted = [system for system in SYSTEMS if system.in_quick or not effort.quick]
    if arguments.only:
        wanted = [system for system in SYSTEMS if system.name in arguments.only]
    measured = Measured({}, {system.name: "not asked for" for system in SYSTEMS if system not in wanted})
    nbytes = max(SINGLES)
    started = time.monotonic()
    load = os.getloadavg()[0]
    if load > 0.5:
        progress(f"something else runs on this machine (load {load:.1f}): the figures will be noisy")
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        pairs: dict[System, Pair] = {}
        stack.callback(close, pairs)
        start(wanted, nbytes, Path(logs), src, pairs, measured.missing)
        measure_all(pairs, measured, effort, arguments.seed, started)
    show(measured)
    draw(measured, arguments.pictures)
    repetitions = [len(samples) for samples in measured.samples.values()]
    report = Report(
        "transfer",
        {
            "seed": arguments.seed,
            "repetitions_least": min(repetitions, default=0),
            "repetitions_most": max(repetitions, default=0),
            "mooncake": MOONCAKE,
            "nixl": NIXL,
            "pinyon": kind,
            "memory_bytes": nbytes,
            "load_before": round(load, 2),
            "duration_s": round(time.monotonic() - started, 1),
            "missing": measured.missing,
        },
    )
    report.results = {**figures(measured, OURS), "ratios": comparisons(measured)}
    report.baseline = figures(measured, [system for system in SYSTEMS if system not in OURS])
    report.aims = aims(measured)
    report.emit()


if __name__ == "__main__":
    main()
