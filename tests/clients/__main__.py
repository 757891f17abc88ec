"""Install clients, benchmarks and evaluations that people use, and run each, unmodified, against a local cluster.

Each has an environment of its own under ``.cache/clients``, made once and kept, with its last output beside it. Clients
that need a tokenizer read it from the checkpoint that is served, a tiny random one.

The exit code is 0 if all ran without an error, and 1 if one did not, or pip refuses a requirement. It is 3 if none
failed, but some were not run, because no package index has them or it is too slow."""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch import vllm
from launch.cluster import ClusterSpec, LocalCluster
from pinyon.core.near import did_you_mean
from tests.clients.child import TooLate, run_child
from tests.clients.clients import CHECKPOINT, CLIENTS, MODEL, Client, Target, Wrong
from tests.clients.environment import ENVIRONMENTS, NotHad, NotInstalled

INSTALL_S = 1800
QUICK_S = 180
"""Seconds after which ``--quick`` starts no further installation."""
RUN_S = 300
"""The limit of a run, for one that hangs."""
NOT_RUN = 3

QUIET = {"DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}
"""Settings by which no client sends telemetry."""
COMPILE_ONCE = {"PYTHONDONTWRITEBYTECODE": ""}
"""A setting by which the first run compiles and keeps what it imports; pip does not compile what is never imported."""


def run(name: str, client: Client, url: str, checkpoint: Path, say: Callable[[str], None]) -> str:
    """Runs a client and returns what it reported. Raises :class:`Wrong`, with one line."""
    log = ENVIRONMENTS / f"{name}.log"
    log.write_bytes(b"")
    with tempfile.TemporaryDirectory(prefix="pinyon-client-") as scratch:
        target = Target(url, Path(scratch), checkpoint)
        (caches := target.scratch / "caches").mkdir()
        program, *arguments = client.command(target)
        where = {"HF_HOME": str(caches), "XDG_CACHE_HOME": str(caches), "XDG_CONFIG_HOME": str(caches)}
        say(f"{name}: running ...")
        try:
            status = run_child(
                [str(client.environment.programs / program), *arguments],
                log,
                RUN_S,
                cwd=target.scratch,
                environment={**QUIET, **COMPILE_ONCE, **where},
                tick=lambda seconds: say(f"{name}: running for {seconds:.0f} s"),
            )
        except TooLate as error:
            raise Wrong(str(error)) from None
        if status:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise Wrong(f"exit code {status}: {' '.join(last)}")
        try:
            return client.report(target)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise Wrong(f"left no report that can be read: {error!r}") from error


def run_all(names: Sequence[str], quick: bool, engine: str, console: Console) -> int:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    table = Table("client", "package", "result", "install s", "run s", title="Unmodified clients")
    outcomes: Counter[str] = Counter()
    quick_end_s = time.monotonic() + QUICK_S
    if engine == "vllm":  # whose kernels cannot run the other checkpoint
        vllm.prepare()
        checkpoint = vllm.small_checkpoint()
        spec = ClusterSpec(
            prefill=0, decode=0, mixed=2, engine="vllm", model=str(checkpoint), served_model_name=MODEL, store_mib=256
        )
    else:
        checkpoint = CHECKPOINT
        spec = ClusterSpec(prefill=1, decode=1, model=str(checkpoint), served_model_name=MODEL, pool_blocks=512)
    with tempfile.TemporaryDirectory(prefix="pinyon-clients-") as logs, LocalCluster(spec, Path(logs)) as cluster:
        for name in names:
            client = CLIENTS[name]
            began_s = time.monotonic()
            made_s = 0.0
            try:
                client.environment.make(max(0.0, quick_end_s - began_s) if quick else INSTALL_S, say)
                made_s = time.monotonic() - began_s
                outcome, told = "ok", run(name, client, cluster.http, checkpoint, say)
            except NotHad as error:
                outcome, told = "NOT RUN", str(error)
            except (NotInstalled, Wrong) as error:
                outcome, told = "FAILED", str(error)
            took_s = time.monotonic() - began_s
            outcomes[outcome] += 1
            say(f"{name}: {outcome}: {told}")
            table.add_row(
                name,
                client.package,
                f"{outcome}: {told[:160]}",
                f"{made_s or took_s:.0f}",
                f"{took_s - made_s:.0f}" if made_s else "-",
            )
    console.print(table, markup=False)
    say(f"{outcomes['ok']} ran without an error, {outcomes['FAILED']} failed, {outcomes['NOT RUN']} not run")
    return 1 if outcomes["FAILED"] else NOT_RUN if outcomes["NOT RUN"] else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("./dev clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="those that install within a minute")
    parser.add_argument("--engine", choices=("numpy", "vllm"), default="numpy", help="what serves (default: numpy)")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in CLIENTS]:
        parser.error(f"no client {unknown[0]}{did_you_mean(unknown[0], CLIENTS)}; there are {', '.join(CLIENTS)}")
    names = asked.names or [name for name, client in CLIENTS.items() if client.quick or not asked.quick]
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENTS / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("another ./dev clients is running in this checkout")
            return 1
        return run_all(names, asked.quick, asked.engine, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
