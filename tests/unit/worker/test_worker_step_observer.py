"""The time between tokens as reported to the conductor."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pinyon.core.compiled import compiled
from services.worker.metrics import StepObserver

pytestmark = pytest.mark.skipif(compiled(), reason="fakes stand where compiled code has its own classes")


class Told:
    def __init__(self, running, kv_tokens):
        self.now_s = 10.0
        self.members = SimpleNamespace(running=running, kv_tokens=kv_tokens, scheduler=SimpleNamespace(observe=Mock()))
        self.cache = SimpleNamespace(admission=SimpleNamespace(observe=Mock()))
        self.metrics = SimpleNamespace(step=Mock())
        self.ledger = SimpleNamespace(token_times=SimpleNamespace(decoded=Mock()))
        self.observer = StepObserver(self.metrics, self.cache, self.members, self.ledger, lambda: self.now_s)

    def step(self, positions, at_s):
        self.now_s = at_s
        step = SimpleNamespace(decodes=positions, kv_tokens=sum(positions), tokens=len(positions) + 5)
        self.observer.observe(step, SimpleNamespace(elapsed_s=0.5, decode_s=0.25), len(positions))

    @property
    def told(self):
        return [(*call.args, call.kwargs["running"]) for call in self.ledger.token_times.decoded.call_args_list]


@pytest.mark.parametrize(
    ("running", "kv_tokens"), [(2, 300), (1, 300), (3, 700)], ids=["all", "one ended", "one waits"]
)
def test_the_time_between_two_steps_that_decode(running, kv_tokens):
    told = Told(running, 700)
    told.step([100, 199], 10.0)
    assert told.told == []
    told.step([101, 199], 10.25)
    assert told.told == [(2, 0.25, kv_tokens, running)]
    seen = told.members.scheduler.observe.call_args.args[0]
    assert (seen, told.cache.admission.observe.call_args.args[0]) == (seen, seen)
    assert (seen.decoded, seen.prefill_tokens, seen.seconds, seen.decode_s) == (2, 5, 0.5, 0.25)
    assert told.metrics.step.call_count == 2


def test_idle_time_is_no_time_between_tokens():
    """A decode instance runs no step between two requests, and time in which none waits is not measured."""
    told = Told(0, 0)
    told.step([100], 10.0)  # the only request ends with this step
    told.step([50], 40.0)  # the first step of another request
    assert told.told == []
    told.members.running = 1
    told.step([51], 40.01)
    told.step([52], 40.02)
    assert [seconds for _, seconds, *_ in told.told] == pytest.approx([0.01])


def test_a_step_without_decodes_lies_between():
    told = Told(1, 700)
    told.step([100], 10.0)
    told.step([], 11.0)
    told.step([101], 12.0)
    assert told.told == []
