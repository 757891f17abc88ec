"""The worker's settings agree with the engines there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.cluster import ClusterSpec
from pinyon.model import load_card
from pinyon.profiles.engine_profile import built_in_profiles
from pinyon.runtime.setting_sources import load_settings
from services.worker.engines import ENGINES, create_engine
from services.worker.engines.decode_plan import KERNEL_DEFAULT, KERNELS
from services.worker.settings import WorkerSettings

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_every_engine_can_be_chosen_and_made() -> None:
    for name in ENGINES:
        settings = load_settings(WorkerSettings, ["--engine", name], {})
        engine = create_engine(settings.engine, load_card(), 8, 16, profile=settings.engine_profile)
        assert engine.num_blocks == 8


def test_every_kernel_can_be_chosen_and_runs() -> None:
    assert load_settings(WorkerSettings, [], {}).attention_kernel == KERNEL_DEFAULT
    for name in KERNELS:
        settings = load_settings(WorkerSettings, ["--attention-kernel", name], {})
        assert create_engine("numpy", load_card(), 8, 16, kernel=settings.attention_kernel).kernel == name
        assert create_engine("instant", load_card(), 8, 16, kernel=settings.attention_kernel).kernel == ""


def test_the_built_in_models_context_fits_wherever_it_runs() -> None:
    settings, context = load_settings(WorkerSettings, [], {}), load_card().config.max_context
    spec = ClusterSpec()  # of ./dev up, too
    composed = [
        int(blocks)
        for path in sorted(DEPLOY.glob("compose*.yaml"))
        for blocks in re.findall(r"POOL_BLOCKS: \$\{PINYON_POOL_BLOCKS:-(\d+)\}", path.read_text())
    ]
    assert len(composed) == 3
    assert settings.pool_blocks * settings.block_tokens >= context
    assert spec.pool_blocks * spec.block_tokens >= context
    assert min(composed) * settings.block_tokens >= context


def test_every_profile_can_be_chosen() -> None:
    for name in built_in_profiles():
        assert load_settings(WorkerSettings, ["--engine-profile", name], {}).engine_profile == name


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["--engine", "abacus"], ENGINES),
        (["--engine-profile", "abacus"], built_in_profiles()),
        (["--attention-kernel", "abacus"], KERNELS),
    ],
)
def test_nonsense_ends_with_status_2_and_a_list(arguments, known, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_settings(WorkerSettings, arguments, {})
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert arguments[0] in message
    assert all(name in message for name in known)
