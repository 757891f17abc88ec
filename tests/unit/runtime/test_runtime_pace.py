"""Messages are spaced under load and only then."""

import asyncio

import pytest

from pinyon.runtime import outgoing as module
from pinyon.runtime.outgoing import Pace


class Time:
    """A clock that sleeping advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []
        monkeypatch.setattr(module.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


async def test_a_single_request_never_waits(time):
    pace = Pace(lambda: 1, time)
    for _ in range(5):
        await pace.turn()
    assert time.slept == []


async def test_the_gap_grows_with_what_is_in_flight_up_to_a_bound(time):
    in_flight = 6
    pace = Pace(lambda: in_flight, time)
    await pace.turn()
    await pace.turn()
    in_flight = 1000
    await pace.turn()
    assert time.slept == pytest.approx([0.0006, 0.0015])


async def test_the_first_message_and_late_ones_go_at_once(time):
    pace = Pace(lambda: 1000, time)
    await pace.turn()
    time.now_s += 1.0
    await pace.turn()
    assert time.slept == []


async def test_a_cancelled_wait_does_not_count_as_a_message():
    now_s = 100.0
    pace = Pace(lambda: 1000, lambda: now_s)
    await pace.turn()
    waiting = asyncio.ensure_future(pace.turn())
    await asyncio.sleep(0)
    now_s += 0.0008
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pace.early_s() == pytest.approx(0.0007)
