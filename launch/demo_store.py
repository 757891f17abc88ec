"""The demo's part about the KV store: workers that know a conversation stop, then a store node dies and comes back.

Nothing is taken on trust: the load balancer's report says what a request reused, the node's counters what it gave."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from launch.cluster import STOP_S, WORKERS, LocalCluster
from launch.demo_client import DemoAnswer, chat
from launch.process import KILLED_S, ROOT, START_S, await_ready, end_all
from launch.scrape import Scrape
from pinyon.core.errors import DeadlineExceeded, Unavailable

NODE = "kvstore-0"
DISK_MIB = 256
DOCUMENT = "docs/design/store.md"
DOCUMENT_BYTES = 2600
WAIT_S = 60.0
"""The time within which something must come about, however busy the machine is."""
LOOK_S = 0.02
TURNS = ("What is this about?\n{document}", "How does a block get there?", "What happens when a node dies?")
HITS, PROMOTED = "pinyon_kvstore_hit_blocks_total", "pinyon_kvstore_disk_promoted_objects_total"
PUT, SAVED = "pinyon_kvstore_put_bytes_total", "pinyon_kvstore_disk_saved_bytes_total"
LISTED, ON_DISK = "pinyon_kvstore_listed_blocks", "pinyon_kvstore_disk_objects"
SESSIONS = "pinyon_kvstore_report_sessions"
QUEUED = "pinyon_worker_store_queue_blocks"
ENDED = ("pinyon_worker_stored_blocks_total", "pinyon_worker_dropped_blocks_total")


@dataclass(frozen=True)
class StoreStep:
    """A turn that the store is to help, and the same prompt without reuse on the same workers."""

    where: str
    """The store's tier that is to have the prefix: memory or disk."""
    knew: set[str]
    """The workers that had the conversation before, as long as they lived."""
    reused: DemoAnswer
    computed: DemoAnswer
    hit_tokens: int
    """The tokens of the blocks that the node leased, by its counters; so is the next."""
    disk_tokens: int

    def broken_claims(self) -> list[str]:
        """Returns a sentence for each claim that does not hold."""
        taken = self.reused.report.get("store_tokens", 0)
        others = self.reused.cached_tokens - taken
        claims = {
            "the store changed the answer": self.reused.text == self.computed.text,
            "it ran on a worker that knew the conversation": not self.knew & workers_of(self.reused),
            f"{others} tokens came from workers' own pools": not others,
            "nothing came from the store": taken,
            f"the node's counters know of {self.hit_tokens} tokens only": self.hit_tokens >= taken,
            f"only {self.disk_tokens} tokens came from the disk": self.where != "disk" or self.disk_tokens >= taken,
            f"without reuse, {self.computed.cached_tokens} tokens were reused": not self.computed.cached_tokens,
        }
        return [f"{self.reused.name}: {wrong}" for wrong, holds in claims.items() if not holds]


def workers_of(answer: DemoAnswer) -> set[str]:
    """Returns the names of the two workers that a request ran on."""
    return {str(answer.report.get(f"{role}_instance", "")) for role in ("prefill", "decode")}


class _StoreTalk:
    """A conversation over a cluster whose workers and store node come and go."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.address = cluster.services["lb-0"].endpoints["http"]
        self.document = (ROOT / DOCUMENT).read_text(encoding="utf-8")[:DOCUMENT_BYTES]
        self.block_tokens = cluster.spec.block_tokens
        # No other request of the demo begins like this, so that no worker has even the first block.
        self.messages = [{"role": "system", "content": "The text below is about a store. Answer from it."}]
        self.turn = 0

    def ask(self) -> None:
        """Adds the next question."""
        self.turn += 1
        content = TURNS[self.turn - 1].format(document=self.document)
        self.messages.append({"role": "user", "content": content})

    def answer(self, how: str, *, no_reuse: bool = False) -> DemoAnswer:
        """Returns the answer to the last question. Raises :class:`Unavailable`."""
        name = f"turn {self.turn}, {how}"
        return chat(self.address, name, self.messages, seed=None, no_reuse=no_reuse)

    def node(self, *metrics: str) -> list[int]:
        """Returns metrics of the store node."""
        scrape = Scrape(self.cluster, only=[NODE], metrics=metrics)
        return [int(scrape.total(metric)) for metric in metrics]

    def offered(self) -> int:
        """Returns how many blocks the workers have stored or dropped."""
        scrape = Scrape(self.cluster, only=self.workers, metrics=ENDED)
        return int(sum(scrape.total(metric) for metric in ENDED))

    @property
    def workers(self) -> list[str]:
        return [each.name for role in WORKERS for each in self.cluster.of_kind(role)]

    def begin(self) -> DemoAnswer:
        """Returns the first answer, when the store has its prompt in memory and on the disk."""
        before = self.offered()
        self.ask()
        first = self.answer("nothing known")
        self.messages.append({"role": "assistant", "content": first.text})
        wanted = before + first.prompt_tokens // self.block_tokens
        _await(lambda: self.offered() >= wanted and self.saved(), "the store does not get the prompt")
        return first

    def saved(self) -> bool:
        """Returns whether nothing is on its way to the store or its disk."""
        queued = Scrape(self.cluster, only=self.workers, metrics=[QUEUED]).total(QUEUED)
        put, saved = self.node(PUT, SAVED)
        return not queued and saved >= put

    def step(self, where: str, knew: set[str]) -> StoreStep:
        """Returns the next turn, with the store and without."""
        self.ask()
        hits, promoted = self.node(HITS, PROMOTED)
        reused = self.answer(f"from {where}")
        more_hits, more_promoted = self.node(HITS, PROMOTED)
        computed = self.answer("without reuse", no_reuse=True)
        self.messages.append({"role": "assistant", "content": reused.text})
        hit_tokens, disk_tokens = (
            blocks * self.block_tokens for blocks in (more_hits - hits, more_promoted - promoted)
        )
        return StoreStep(where, knew, reused, computed, hit_tokens, disk_tokens)

    def stop(self, names: set[str]) -> None:
        """Stops workers, and waits until the conductor knows that they are gone."""
        if not names <= set(self.workers):
            raise Unavailable(f"the report of a request names no workers of this suite: {', '.join(sorted(names))}")
        end_all([self.cluster.services[name] for name in sorted(names)], STOP_S)
        self.cluster.wait_instances(self.cluster.spec.instances - len(names), time.monotonic() + WAIT_S)

    def restart(self, names: Collection[str]) -> tuple[int, float]:
        """Kills the store node, and starts it and these stopped workers again.

        Returns how many blocks the node found on its disk, and the seconds until it served."""
        services = [self.cluster.services[name] for name in (NODE, *sorted(names))]
        node = services[0]
        _await(self.saved, "the store does not save what it has")
        node.signal(signal.SIGKILL)
        if not node.wait(KILLED_S):
            raise Unavailable(f"{node} cannot be killed")
        began_s = time.monotonic()
        for service in services:
            service.start_again()
        deadline = began_s + START_S
        await_ready([node], deadline)
        served_s = time.monotonic() - began_s
        await_ready(services[1:], deadline)
        self.cluster.wait_serving(deadline)

        def listed() -> bool:
            blocks, found, sessions = self.node(LISTED, ON_DISK, SESSIONS)
            return blocks >= found and bool(sessions)

        _await(listed, "the store node does not list what is on its disk")
        return self.node(ON_DISK)[0], served_s


def _await(condition: Callable[[], bool], wrong: str) -> None:
    """Waits until the condition holds; raises :class:`DeadlineExceeded`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{wrong} within {WAIT_S:g} s")
        time.sleep(LOOK_S)


def show_store(console: Console, cluster: LocalCluster) -> bool:
    """Shows what the store is for; returns whether each claim holds. Raises a :class:`PinyonError`, ``OSError``."""
    talk = _StoreTalk(cluster)
    console.print("\nNow the KV store: a conversation outlives the workers that know it.", style="bold")
    first = talk.begin()
    knew = workers_of(first)
    talk.stop(knew)
    console.print(f"Turn 1 ran on {_names(knew)}. They were stopped, and their caches with them.")
    moved = talk.step("memory", knew)
    movers = workers_of(moved.reused)
    console.print(f"Turn 2 ran on {_names(movers)}, which never saw turn 1: {_gain(moved)}.")
    found, seconds = talk.restart(knew)
    talk.stop(movers)
    console.print(
        f"The store node was killed (SIGKILL). Started again at {cluster.services[NODE].endpoints['grpc']}, it served "
        f"after {seconds:.1f} s and found {found} blocks on its disk. {_names(movers)} were stopped, too."
    )
    revived = talk.step("disk", movers)
    console.print(
        f"Turn 3 ran on {_names(workers_of(revived.reused))}, started again with empty caches: {_gain(revived)}."
    )
    steps = [moved, revived]
    console.print(_table(first, steps))
    broken = [claim for step in steps for claim in step.broken_claims()]
    for claim in broken:
        console.print(f"FAILED: {claim}", style="bold red", markup=False)
    if not broken:
        console.print(
            "OK: both answers from the store are equal, token for token, to those without reuse", style="bold green"
        )
    return not broken


def _names(workers: Collection[str]) -> str:
    return " and ".join(sorted(workers, reverse=True))


def _gain(step: StoreStep) -> str:
    reused, computed = step.reused, step.computed
    share = f"{reused.cached_tokens} of {reused.prompt_tokens} prompt tokens came from the store's {step.where}"
    return f"{share}, and the first token after {reused.ttft_s * 1000:.0f} ms instead of {computed.ttft_s * 1000:.0f}"


def _table(first: DemoAnswer, steps: Collection[StoreStep]) -> Table:
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = [Column(name, **right) for name in ("prompt", "reused", "memory", "disk", "TTFT ms")]
    table = Table("request", "prefill", *columns, title="Tokens from the store's memory and disk", title_justify="left")
    rows: list[tuple[DemoAnswer, int, int]] = [(first, 0, 0)]
    for step in steps:
        rows += [(step.reused, step.hit_tokens - step.disk_tokens, step.disk_tokens), (step.computed, 0, 0)]
    for answer, memory, disk in rows:
        table.add_row(
            *(answer.name, str(answer.report.get("prefill_instance")), str(answer.prompt_tokens)),
            *(str(answer.cached_tokens), str(max(0, memory)), str(disk), f"{answer.ttft_s * 1000:.0f}"),
        )
    return table
