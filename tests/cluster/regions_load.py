"""Load on several regions, and which region answered each request."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from launch.regions import LocalRegions
from launch.scrape import Scrape
from tests.cluster.asking import REPORT, complete
from tests.waiting import WAIT_S, wait_until

PROMPTS = 6
TOKENS = 96
CLIENTS = 30
REFUSED = "refused"


def ask(regions: LocalRegions, region: str, number: int) -> tuple[str, str]:
    """Returns the text and the region that served it last."""
    prompt = f"In region after region, question {number % PROMPTS} is asked."
    cluster, sampling = regions.clusters[region], {"max_tokens": TOKENS, "seed": 7, "temperature": 0.8}
    reply = complete(cluster, REPORT, prompt=prompt, **sampling)
    if reply.status != 200:
        raise OSError(f"HTTP {reply.status}")
    answer = reply.json
    return answer["choices"][0]["text"], answer["pinyon"].get("region", region)


class Load:
    """A load of more clients than a region has room for; each client asks again and again until ``check``."""

    def __init__(self, regions: LocalRegions, region: str = "us", *, may_fail: bool = False) -> None:
        """Starts the clients. With ``may_fail`` a clear refusal counts as an answer of :data:`REFUSED`."""
        self._regions = regions
        self._region = region
        self._may_fail = may_fail
        self.expected = [ask(regions, region, number)[0] for number in range(PROMPTS)]
        self._asked = 0
        self._answers: dict[int, tuple[str, str]] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._clients: list[Future[None]] = []

    def __enter__(self) -> Load:
        self._clients += [self._threads.submit(self._run) for _ in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._threads.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while not self._ending:
            with self._changed:
                number = self._asked
                self._asked += 1
            try:
                answer = ask(self._regions, self._region, number)
            except OSError:
                if not self._may_fail:
                    raise
                answer = self.expected[number % PROMPTS], REFUSED
            with self._changed:
                self._answers[number] = answer
                self._changed.notify_all()

    def more(self, count: int = CLIENTS) -> Counter[str]:
        """Returns how many of the next ``count`` answers to requests from now on each region gave."""
        with self._changed:
            first = self._asked

            def enough() -> bool:
                return sum(number >= first for number in self._answers) >= count

            came = self._changed.wait_for(enough, WAIT_S)
            served = Counter(region for number, (_, region) in self._answers.items() if number >= first)
        if not came:
            self.check()  # raises the error of a client that has stopped
        assert came, "answers do not come"
        return served

    def check(self) -> Counter[str]:
        """Ends the load and checks all answers; returns how many each region gave."""
        self._ending = True
        for client in self._clients:
            client.result(WAIT_S)
        assert len(self._answers) == self._asked
        for number, (text, region) in self._answers.items():
            assert text == self.expected[number % PROMPTS], f"request {number} from {region}"
        return Counter(region for _, region in self._answers.values())


def value(regions: LocalRegions, region: str, name: str) -> float:
    return Scrape(regions.clusters[region], metrics=(name,)).total(name)


def until(condition, what: str) -> None:
    """Waits for a condition; a process that starts or ends may refuse to answer meanwhile."""

    def holds() -> bool:
        with contextlib.suppress(OSError, LookupError):
            return bool(condition())
        return False

    wait_until(holds, what, poll_s=0.05)


def taken_by(regions: LocalRegions, region: str) -> None:
    """Waits until the region serves requests, while there is a :class:`Load`."""
    until(lambda: value(regions, region, "pinyon_worker_running_requests") >= 2, f"{region} serves nothing")
