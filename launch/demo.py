"""The main job on real input: conversations and a batch over the project's own documents, with and without reuse.

The demo starts the suite, talks to it over OpenAI's HTTP like any client, and fails if reuse changes a single token."""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from launch.cluster import ClusterSpec, LocalCluster
from launch.demo_client import MODEL, DemoAnswer, chat
from launch.demo_store import DISK_MIB, show_store
from launch.process import ROOT
from launch.scrape import Scrape
from pinyon.core.errors import PinyonError
from pinyon.transfer.transports.shm.cma import shm_available

BATCH_CONCURRENCY = 2
DOCUMENT_BYTES = 2600
MAX_LOG_LINES = 100_000
ANSWER_COLUMNS = 100
"""The width of a terminal that has room for the beginnings of answers beside the numbers."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell gives it."""
OTHER_WAYS_SHARE = 0.01
"""The share of bytes on other paths that needs no remark: now and then, the transfer engine tries another path."""
TURNS = (
    "Read this and say what the project is about:\n{document}",
    "Which parts does it have?",
    "Which of them touches the KV bytes?",
    "What happens when one of them dies?",
    "Sum it up in one line.",
)
QUESTIONS = (
    "What may a pure room import?",
    "Which plane carries KV bytes?",
    "Who owns a request?",
    "What is a block key made of?",
    "When is target memory given back?",
    "How does a placement look?",
    "What does the cost model follow?",
    "Which words does everybody use?",
)


COLUMNS = ("request", "prompt", "reused", "local/peer/store", "TTFT ms", "tokens/s", "answer")


def _cells(outcome: DemoAnswer) -> list[str]:
    sources = [str(outcome.report.get(f"{source}_tokens", 0)) for source in ("local", "peer", "store")]
    answer = outcome.text.replace("\n", " ") or "(it ended at once)"
    return [
        *(outcome.name, str(outcome.prompt_tokens), str(outcome.cached_tokens), "/".join(sources)),
        f"{outcome.ttft_s * 1000:.0f}",
        f"{outcome.tokens_per_s:.0f}" if outcome.completion_tokens > 1 else "–",
        escape(answer[:20] + ("…" if len(answer) > 20 else "")),
    ]


def _conversation(address: str, name: str, document: str, seed: int | None, no_reuse: bool) -> Iterator[DemoAnswer]:
    """Yields the answers of a conversation, turn by turn; each prompt contains all earlier turns."""
    messages = [{"role": "system", "content": "You answer from the text you are given."}]
    for number, turn in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": turn.format(document=document)})
        outcome = chat(address, f"{name} turn {number}", messages, seed=seed, no_reuse=no_reuse)
        messages.append({"role": "assistant", "content": outcome.text})
        yield outcome


def _batch(address: str, document: str, no_reuse: bool) -> Iterator[DemoAnswer]:
    """Yields the answers to questions that share one long system prompt, asked a few at a time."""
    system = {"role": "system", "content": f"Answer from this document.\n{document}"}

    def ask(item: tuple[int, str]) -> DemoAnswer:
        number, question = item
        messages = [system, {"role": "user", "content": question}]
        seed = None if number % 2 else 1000 + number
        return chat(address, f"batch {number}", messages, seed=seed, no_reuse=no_reuse)

    with ThreadPoolExecutor(BATCH_CONCURRENCY) as pool:
        yield from pool.map(ask, enumerate(QUESTIONS, 1))


def demo_documents() -> tuple[str, str]:
    """Returns two texts of the project: the first for the conversation, the second for the batch."""
    first, second = (
        (ROOT / name).read_text(encoding="utf-8")[:DOCUMENT_BYTES] for name in ("README.md", "ARCHITECTURE.md")
    )
    return first, second


def demo_requests(address: str, documents: tuple[str, str], *, no_reuse: bool) -> Iterator[DemoAnswer]:
    """Runs the whole job and yields an outcome as each request finishes, always in the same order."""
    yield from _conversation(address, "chat", documents[0], None, no_reuse)
    yield from _batch(address, documents[1], no_reuse)


def _run(console: Console, address: str, title: str, *, no_reuse: bool) -> list[DemoAnswer]:
    table = Table(title=title, title_justify="left", expand=False)
    columns = COLUMNS if console.width >= ANSWER_COLUMNS else COLUMNS[:-1]
    for column in columns:
        table.add_column(column, justify="left" if column in ("request", "answer") else "right", no_wrap=True)
    outcomes = []
    with Live(table, console=console, refresh_per_second=8, vertical_overflow="visible"):
        for outcome in demo_requests(address, demo_documents(), no_reuse=no_reuse):
            outcomes.append(outcome)
            table.add_row(*_cells(outcome)[: len(columns)])
    if not console.is_terminal:
        console.print()  # a live table that is printed once has no line end
    return outcomes


def _verdict(console: Console, reused: list[DemoAnswer], computed: list[DemoAnswer]) -> bool:
    """Prints the differences, and returns whether all texts are equal."""
    prompt = sum(outcome.prompt_tokens for outcome in reused)
    cached = sum(outcome.cached_tokens for outcome in reused)
    by_source = {
        source: sum(outcome.report.get(f"{source}_tokens", 0) for outcome in reused)
        for source in ("local", "peer", "store")
    }
    columns = [Column(name, justify="right") for name in ("with reuse", "without", "ratio")]
    table = Table("", *columns, title="The difference", title_justify="left")
    rows = (
        ("TTFT, median ms", [statistics.median(o.ttft_s for o in run) * 1000 for run in (reused, computed)]),
        ("TTFT, mean ms", [statistics.fmean(o.ttft_s for o in run) * 1000 for run in (reused, computed)]),
        ("whole requests, s", [sum(o.total_s for o in run) for run in (reused, computed)]),
    )
    for label, (left, right) in rows:
        table.add_row(label, f"{left:.1f}", f"{right:.1f}", f"{right / left:.1f}×" if left else "–")
    tokens_computed = [sum(o.prompt_tokens - o.cached_tokens for o in run) for run in (reused, computed)]
    ratio = f"{tokens_computed[1] / tokens_computed[0]:.1f}×" if tokens_computed[0] else "–"
    table.add_row("prompt tokens computed", str(tokens_computed[0]), str(tokens_computed[1]), ratio)
    console.print(table)
    share = f"{cached} of {prompt} prompt tokens ({100 * cached / prompt:.0f} %) were reused"
    where = "{local} from the prefill worker's own pool, {peer} from other workers, {store} from the KV store"
    console.print(f"{share}: {where.format(**by_source)}.")
    if why := why_late(reused):
        console.print(why)
    differing = [one.name for one, other in zip(reused, computed, strict=True) if one.text != other.text]
    if differing:
        console.print(f"FAILED: reuse changed the output of {', '.join(differing)}", style="bold red")
        return False
    if not cached or any(outcome.cached_tokens for outcome in computed):
        console.print("FAILED: the two runs did not differ in reuse", style="bold red")
        return False
    console.print(
        f"OK: all {len(reused)} answers are equal, token for token, with and without reuse", style="bold green"
    )
    return True


def why_late(reused: list[DemoAnswer]) -> str:
    """Returns why a request that reuses has a long TTFT in the batch; empty if none has.

    The first two requests of the batch arrive together, so one may wait for the prefix that the other computes."""
    first, second = (outcome for outcome in reused if outcome.name in ("batch 1", "batch 2"))
    waited, computed = (first, second) if first.cached_tokens else (second, first)
    if not waited.cached_tokens or computed.cached_tokens:
        return ""
    return (
        f"{waited.name} reused what {computed.name} was computing at the same time: it waited for that, so its TTFT is "
        "long, too."
    )


def show_ways(console: Console, cluster: LocalCluster) -> None:
    """Prints the paths that the KV of both runs took, by the metrics of the processes that moved it."""
    metrics = Scrape(cluster)
    moved = {name: metrics.labelled("pinyon_transfer_path_bytes_total", name) for name in ("shm", "rdma", "tcp")}
    ways = ", ".join(f"{_megabytes(nbytes)} by {name}" for name, nbytes in moved.items() if nbytes or name != "rdma")
    stored, read = (metrics.total(f"pinyon_kvstore_{name}_bytes_total") for name in ("put", "get"))
    store = f"{_megabytes(stored)} of it into the KV store, {_megabytes(read)} out of it"
    console.print(f"KV moved between processes: {ways}; {store}.")
    if moved["tcp"] > OTHER_WAYS_SHARE * sum(moved.values()):
        console.print(f"Not by shm, though all are on this host: {_why_not_shm(cluster)}", markup=False)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _why_not_shm(cluster: LocalCluster) -> str:
    """Returns why shm was not used: as this process, which is like the suite's, finds out, or by the suite's logs."""
    unavailable = shm_available()
    if unavailable:
        return unavailable
    for path in [service.log_path for service in cluster.services.values() if service.log_path is not None]:
        with path.open(errors="replace") as log:
            for line in itertools.islice(log, MAX_LOG_LINES):
                if found := re.search(r"not using shm with a peer on this host: (.+)", line):
                    return found[1]
    return "no log says why; were other transports named in the environment?"


def run_demo(log_dir: Path | None = None) -> int:
    """Runs the demo; the exit status is 0 only if all that it shows holds, and answers are the same without reuse."""
    console = Console(width=None if Console().is_terminal else 110)
    with tempfile.TemporaryDirectory(prefix="pinyon-disk-", ignore_cleanup_errors=True) as disk:
        return _demo(console, log_dir, disk)


def _demo(console: Console, log_dir: Path | None, disk: str) -> int:
    extra = {"kvstore": ("--disk-dir", disk, "--disk-mib", str(DISK_MIB))}
    try:
        cluster = LocalCluster(ClusterSpec(prefill=2, decode=2, stores=1, extra=extra), log_dir)
    except PinyonError as error:
        console.print(f"FAILED: {error}", style="bold red", markup=False)
        return 1
    try:
        with console.status("starting 2 prefill, 2 decode, 1 store node, conductor, load balancer, Redis …"):
            started = time.perf_counter()
            cluster.start()
        if not cluster.spec.stores:
            console.print("No Redis was found: this runs without the KV store.", style="yellow")
        console.print(f"{len(cluster.services)} processes are up after {time.perf_counter() - started:.1f} s")
        console.print(f"The model ({MODEL}) has random weights: real arithmetic, gibberish answers.\n")
        address = cluster.services["lb-0"].endpoints["http"]
        reused = _run(console, address, "With reuse", no_reuse=False)
        computed = _run(console, address, "The same without reuse", no_reuse=True)
        good = _verdict(console, reused, computed)
        show_ways(console, cluster)
        if cluster.spec.stores:
            good = show_store(console, cluster) and good
    except (PinyonError, OSError) as error:
        console.print(f"FAILED: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopping …")
        return INTERRUPTED
    finally:
        cluster.stop()
    return 0 if good else 1
