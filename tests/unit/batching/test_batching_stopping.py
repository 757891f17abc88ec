"""Stopping policies by hand and against worlds whose best decision is known (FEATHER §4.3)."""

from __future__ import annotations

import itertools
import json
import math
from random import Random

import pytest

from pinyon.batching.stopping import ADD, STOP, Always, Bandit, BatchState, Heuristic, StoppingPolicy, Taken, binned
from pinyon_lab.policies.feather import LabFeatherSettings, LabLearning
from pinyon_lab.policies.q_learning import QLearning, QLearningSettings

STRANGER = BatchState(20, 40, 10)
PEER = BatchState(1, 1, 19)


def test_the_heuristic_is_the_papers() -> None:
    policy = Heuristic()
    assert policy.adds(BatchState(100, 0, 0))  # the addition costs nothing
    assert policy.adds(BatchState(3, 1000, 0))  # a small batch takes any request
    assert [loss for loss in range(10) if policy.adds(BatchState(4, loss, 0))] == [0, 1, 2, 3, 4, 5]
    # Ten requests wait, the candidate included.
    assert [loss for loss in range(10) if policy.adds(BatchState(4, loss, 9))] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [loss for loss in range(10) if policy.adds(BatchState(4, loss, 8))] == [0, 1, 2, 3, 4, 5]


def test_bins() -> None:
    assert [binned(BatchState(batch, 0, 0)).batch for batch in (0, 1, 2, 3, 4, 7, 8, 500)] == [0, 1, 2, 2, 3, 3, 4, 9]
    assert [binned(BatchState(1, loss, 0)).loss for loss in (0, 1, 2, 3, 4, 5, 400)] == [0, 1, 2, 3, 3, 4, 4]


def test_upper_confidence_bounds_are_the_formula() -> None:
    policy = Bandit()
    stop, add = [Taken(STRANGER, STOP)], [Taken(STRANGER, ADD)]
    assert policy.adds(STRANGER)  # an untried decision: adding first
    policy.learn(add, 100.0)
    assert not policy.adds(STRANGER)
    policy.learn(stop, 102.0)
    # c is a share of the mean reward, 100 + 0.05 * 2; S = 2, n = 1 each: as much for both.
    assert not policy.adds(STRANGER)
    for _ in range(3):
        policy.learn(stop, 102.0)
    scale = 102.0 - 2.0 * 0.95**4
    spread = [0.05 * scale * math.sqrt(math.log(5) / count) for count in (4, 1)]
    assert 102.0 + spread[0] < 100.0 + spread[1]
    assert policy.adds(STRANGER)


def settle(policy: StoppingPolicy, worth: dict[int, float], rounds: int, random: Random) -> float:
    """Returns the share of better decisions in the last quarter; rewards vary by a tenth."""
    best = max(worth, key=lambda action: worth[action])
    right = 0
    for number in range(rounds):
        action = int(policy.adds(STRANGER))
        policy.learn([Taken(PEER, ADD), Taken(STRANGER, action)], worth[action] * random.uniform(0.9, 1.1))
        right += number >= rounds * 3 // 4 and action == best
    return right / (rounds - rounds * 3 // 4)


LEARNING = [LabLearning.BANDIT, LabLearning.Q_LEARNING]


@pytest.mark.parametrize("stop", LEARNING)
@pytest.mark.parametrize("better", [STOP, ADD])
def test_what_is_better_by_a_fifth_is_found(stop: LabLearning, better: int) -> None:
    random = Random(5)
    policy = LabFeatherSettings(stop=stop, seed=1).stopping()
    assert settle(policy, {better: 1200.0, 1 - better: 1000.0}, 600, random) > 0.9


@pytest.mark.parametrize("stop", LEARNING)
def test_when_the_workload_shifts_it_looks_around_again(stop: LabLearning) -> None:
    random = Random(6)
    policy = LabFeatherSettings(stop=stop, seed=1).stopping()
    assert settle(policy, {STOP: 3000.0, ADD: 1500.0}, 600, random) > 0.9
    calm = policy.exploring
    # From here on everything is slower, and the better decision is the other one.
    for _ in range(400):
        action = int(policy.adds(STRANGER))
        policy.learn([Taken(STRANGER, action)], {STOP: 400.0, ADD: 600.0}[action] * random.uniform(0.9, 1.1))
        if policy.exploring > 3 * calm:
            break
    else:
        pytest.fail("it never looked around")
    assert settle(policy, {STOP: 400.0, ADD: 600.0}, 800, random) > 0.9


@pytest.mark.parametrize(("stop", "bad"), [(LabLearning.BANDIT, 600.0), (LabLearning.Q_LEARNING, 800.0)])
def test_what_was_bad_once_is_tried_again_without_a_shift(stop: LabLearning, bad: float) -> None:
    random = Random(8)
    policy = LabFeatherSettings(stop=stop, seed=1).stopping()
    # Stopping was tried while the batch was small; the same bin now has larger batches.
    assert settle(policy, {STOP: bad, ADD: 1000.0}, 400, random) > 0.9
    assert policy.shifts == 0
    assert settle(policy, {STOP: 1150.0, ADD: 1000.0}, 2000, random) > 0.9
    assert policy.shifts == 0


@pytest.mark.parametrize("stop", LEARNING)
def test_of_a_new_state_both_actions_are_tried(stop: LabLearning) -> None:
    policy = LabFeatherSettings(stop=stop, seed=1).stopping()
    for _ in range(400):  # until random trials end
        policy.learn([Taken(PEER, ADD)], 100.0)
    for action in (STOP, ADD):
        other = LabFeatherSettings(stop=stop, seed=1).stopping()
        other.restore(policy.table())
        other.learn([Taken(STRANGER, action)], 100.0)
        assert other.adds(STRANGER) == (action == STOP)


def test_a_batch_left_as_it_is_ends_an_episode_of_q_learning() -> None:
    policy = QLearning(QLearningSettings(rate=1.0, discount=0.5))
    policy.learn([Taken(PEER, ADD), Taken(STRANGER, STOP), Taken(PEER, ADD)], 100.0)
    assert policy.table() == {"1/1/5": [-1.0, 100.0, 0.0, 2.0], "5/4/4": [100.0, -1.0, 1.0, 0.0]}
    policy.learn([Taken(PEER, ADD), Taken(STRANGER, STOP)], 200.0)
    # 0.5 * 200 + 0.5 * max(Q of the stranger, which is learned first: an episode is learned from its end)
    assert policy.table()["5/4/4"][STOP] == 200.0
    assert policy.table()["1/1/5"][ADD] == 200.0


@pytest.mark.parametrize("stop", LEARNING)
def test_what_was_learned_can_be_kept(stop: LabLearning) -> None:
    random = Random(7)
    policy = LabFeatherSettings(stop=stop, seed=2).stopping()
    settle(policy, {STOP: 1000.0, ADD: 500.0}, 300, random)
    kept = json.loads(json.dumps(policy.table()))
    other = LabFeatherSettings(stop=stop, seed=3).stopping()
    other.restore(kept)
    assert other.table() == policy.table()
    assert sum(other.adds(STRANGER) for _ in range(200)) < 20
    for wrong in (
        {"1/2": [1.0] * 4},
        {"1/2/3": [1.0]},
        {"1/2/3": [math.nan] * 4},
        {"x/2/3": [1.0] * 4},
        {"1/0/1": [-5.0, 5.0, -3.0, 3.0]},
    ):
        with pytest.raises(ValueError, match="state"):
            other.restore(wrong)
    assert other.table() == policy.table()


def test_who_does_not_learn_has_no_table() -> None:
    assert Always().table() == {}
    Always().restore({})
    with pytest.raises(ValueError, match="no table"):
        Always().restore({"1/2/3": [1.0] * 4})


@pytest.mark.parametrize(
    ("settings", "message"),
    [(lambda: QLearningSettings(rate=0), "rate"), (lambda: QLearningSettings(explore_min=0.5, awake=0.4), "awake")],
)
def test_settings_have_bounds(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings()


def test_tables_stay_small() -> None:
    policy = Bandit()
    for batch, loss, peers in itertools.product(range(0, 600, 7), range(0, 400, 13), range(0, 600, 11)):
        policy.adds(BatchState(batch, loss, peers))
    assert len(policy.table()) <= 11 * 5 * 11
