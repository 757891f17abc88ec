"""The cost models recover known machines, follow changes, and never predict nonsense."""

import random

import pytest

from pinyon.placement.cost_model import DecodeCostModel, NonNegativeLeastSquares, PrefillCostModel
from pinyon.placement.transfer_cost import TransferCostModel

# Columns in seconds: start, per token, per token² of attention.
MACHINE = (5e-3, 3e-5, 2e-9)


def prefill_s(prompt: int, prefix: int, machine=MACHINE) -> float:
    k0, k1, k2 = machine
    return k0 + k1 * (prompt - prefix) + k2 * (prompt**2 - prefix**2)


def train(model: PrefillCostModel, machine, samples: int, noise: float = 0.0, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(samples):
        prompt = rng.randint(1, 60_000)
        prefix = rng.randint(0, prompt - 1)
        model.observe(prompt - prefix, prefix, prefill_s(prompt, prefix, machine) * (1 + noise * rng.uniform(-1, 1)))


def test_known_coefficients_are_recovered():
    model = PrefillCostModel()
    train(model, MACHINE, 300)
    for fitted, true in zip(model.coefficients, MACHINE, strict=True):
        assert fitted == pytest.approx(true, rel=0.05)
    assert model.predict_s(32_000, 8_000) == pytest.approx(prefill_s(32_000, 8_000), rel=0.01)
    assert model.predict_s(100, 0) == pytest.approx(prefill_s(100, 0), rel=0.05)


def test_noise_of_a_fifth_leaves_predictions_within_a_tenth():
    model = PrefillCostModel()
    train(model, MACHINE, 500, noise=0.2)
    for prompt, prefix in ((500, 0), (8_000, 4_000), (60_000, 0), (60_000, 59_000)):
        assert model.predict_s(prompt, prefix) == pytest.approx(prefill_s(prompt, prefix), rel=0.1)


def test_the_prior_answers_before_anything_was_measured():
    assert PrefillCostModel().predict_s(1000, 0) == pytest.approx(0.104, rel=0.01)
    assert TransferCostModel().predict_s(10**9) == pytest.approx(1.001)
    assert TransferCostModel().predict_s(0) == 0
    assert DecodeCostModel().predict_s(10, 20_000) == pytest.approx(0.012)


@pytest.mark.parametrize("factor", [1e-4, 0.1, 30.0])
def test_one_kind_of_request_is_learned_within_a_few_samples(factor):
    model = PrefillCostModel()
    seconds = PrefillCostModel().predict_s(512, 0) * factor
    for _ in range(30):
        model.observe(512, 0, seconds)
    assert model.predict_s(512, 0) == pytest.approx(seconds, rel=0.05, abs=2e-5)


def test_forgetting_follows_a_machine_that_got_slower():
    model = PrefillCostModel()
    train(model, MACHINE, 300)
    slower = tuple(3 * k for k in MACHINE)
    train(model, slower, 600, seed=2)
    assert model.predict_s(20_000, 0) == pytest.approx(prefill_s(20_000, 0, slower), rel=0.05)


def test_a_single_hiccup_moves_predictions_little():
    model = PrefillCostModel()
    train(model, MACHINE, 300)
    before = model.predict_s(10_000, 0)
    model.observe(10_000, 0, 1000 * before)
    assert before <= model.predict_s(10_000, 0) < 1.5 * before


def test_predictions_are_monotone_and_never_negative():
    rng = random.Random(3)
    for _ in range(50):
        model = PrefillCostModel()
        for _ in range(20):
            model.observe(rng.randint(1, 10_000), rng.randint(0, 10_000), rng.choice((0.0, 1e-6, 0.1, 1.0, 1000.0)))
        assert min(model.coefficients) >= 0
        by_prefix = [model.predict_s(8192, prefix) for prefix in range(0, 8192, 512)]
        assert by_prefix == sorted(by_prefix, reverse=True)
        by_length = [model.predict_s(512 + more, 512) for more in range(1, 8192, 512)]
        assert by_length == sorted(by_length)


def test_the_active_constraint_is_solved_exactly():
    # y falls with x, so the best non-negative slope is 0, and the start is the mean.
    fit = NonNegativeLeastSquares((1.0, 1.0))
    for x, y in ((1.0, 3.0), (2.0, 2.0), (3.0, 1.0)) * 200:
        fit.observe((1.0, x), y)
    start, slope = fit.coefficients
    assert slope == 0
    assert 1.0 < start < 3.0


def test_transfer_bandwidth_is_learned():
    model = TransferCostModel()
    rng = random.Random(4)
    for _ in range(200):
        size = rng.randint(10**4, 10**8)
        model.observe(size, 2e-4 + size / 5e9)
    assert model.predict_s(5 * 10**7) == pytest.approx(1.02e-2, rel=0.02)


def test_decode_time_is_learned_by_batch_and_by_kv_read():
    model = DecodeCostModel()
    rng = random.Random(5)
    for _ in range(400):
        batch = rng.randint(1, 32)
        tokens = batch * rng.randint(100, 20_000)
        model.observe(batch, tokens, 0.030 + 0.0005 * batch + 1e-7 * tokens)
    for fitted, true in zip(model.coefficients, (0.030, 0.0005, 1e-7), strict=True):
        assert fitted == pytest.approx(true, rel=0.05)
    assert model.predict_s(64, 500_000) == pytest.approx(0.112, rel=0.03)


@pytest.mark.parametrize("seconds", [1e-3, 0.02, 0.5])
def test_batches_of_one_say_little_of_what_a_request_more_takes(seconds):
    """The engine's speed does not matter: a tight limit must not keep the second request away."""
    model = DecodeCostModel()
    for _ in range(100):
        model.observe(1, 2000, seconds)
    assert model.predict_s(1, 2000) == pytest.approx(seconds, rel=0.02)
    assert seconds < model.predict_s(8, 16_000) < 1.2 * seconds


def test_a_slope_that_was_too_flat_is_mended_as_the_batch_grows():
    model = DecodeCostModel()
    for batch in (1, 2, 3, 4):
        for _ in range(25):
            model.observe(batch, 0, 0.01 + 0.02 * batch)
    assert model.predict_s(8) == pytest.approx(0.17, rel=0.05)


@pytest.mark.parametrize("batch", [1, 16])
def test_the_decode_time_of_a_busy_hour_is_soon_forgotten(batch):
    """Tokens take 10 ms on an idle instance, and half a second on a busy one, with parts of prompts between them."""
    rng, model = random.Random(5), DecodeCostModel()
    for _ in range(300):
        model.observe(batch, 500 * batch, 0.484 * rng.uniform(0.5, 1.5))
    assert model.predict_s(1, 100) > 0.2
    for _ in range(10):
        model.observe(1, 100, 0.01 * rng.uniform(0.9, 1.2))
    assert model.predict_s(1, 100) < 0.02


def test_the_prefill_time_of_a_busy_hour_is_soon_forgotten():
    rng, model = random.Random(5), PrefillCostModel()
    for _ in range(300):
        model.observe(rng.randint(50, 4000), 0, 2.0 * rng.uniform(0.5, 1.5))
    assert model.predict_s(500, 0) > 0.3
    for _ in range(10):
        model.observe(500, 0, 0.05 * rng.uniform(0.9, 1.2))
    assert model.predict_s(500, 0) < 0.1


def test_what_says_nothing_is_not_learned_from():
    model = PrefillCostModel()
    model.observe(0, 100, 1.0)
    transfer = TransferCostModel()
    transfer.observe(0, 1.0)
    decode = DecodeCostModel()
    decode.observe(0, 100, 1.0)
    assert model.samples == transfer.samples == decode.samples == 0


def test_a_new_instance_starts_from_what_its_sibling_learned():
    old, new = PrefillCostModel(), PrefillCostModel()
    train(old, MACHINE, 100)
    new.copy_from(old)
    assert new.coefficients == old.coefficients
    for _ in range(8):  # a trained fit is solved only every few samples
        new.observe(1000, 0, 10.0)
    assert new.coefficients != old.coefficients


@pytest.mark.parametrize("prior", [(), (1.0, 0.0), (1.0,) * 5])
def test_a_prior_must_be_positive_and_small(prior):
    with pytest.raises(ValueError, match="prior"):
        NonNegativeLeastSquares(prior)
