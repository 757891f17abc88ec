"""A policy choice that names a file gets the file's content before any policy sees the choice."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from launch.cluster import ClusterSpec
from pinyon.core.errors import InvalidArgument
from pinyon.eviction import EVICTION_POLICIES
from pinyon.eviction.day_fits import DayFits
from pinyon.eviction.fit import Fit
from pinyon.eviction.workload_aware import WorkloadAware
from pinyon.runtime.eviction_choice import FILE_BYTES_MAX, checked_eviction, whole_choice
from pinyon.runtime.setting_sources import load_settings
from services.kvstore.settings import KvStoreSettings
from services.worker.settings import WorkerSettings

YESTERDAY = DayFits({hour: {"": Fit(hour / 24, 60.0)} for hour in range(24)})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fits.json"
    path.write_text(json.dumps({"name": "trace-fit", **YESTERDAY.json()}))
    return path


def test_the_fits_take_the_place_of_the_file(file: Path) -> None:
    assert whole_choice("lru") == "lru"
    assert whole_choice("workload_aware:life_s=5") == "workload_aware:life_s=5"
    whole = whole_choice(f"workload_aware: life_s=5, fits = {file},fitted=false")
    assert whole == f"workload_aware: life_s=5,fits={YESTERDAY},fitted=false"
    assert isinstance(EVICTION_POLICIES.make(whole), WorkloadAware)


def test_a_clock_knows_the_hour(file: Path) -> None:
    """The clock's zero does not matter, unless the midnight is given."""
    made = EVICTION_POLICIES.make(whole_choice(f"workload_aware:fits={file}", lambda: time.time() - 1e6))
    told = EVICTION_POLICIES.make(whole_choice(f"workload_aware:fits={file},midnight_s=50", lambda: 1e6))
    assert isinstance(made, WorkloadAware)
    assert isinstance(told, WorkloadAware)
    for policy, midnight_s in ((made, -1e6), (told, 50.0)):
        work = policy.refit(midnight_s + 15.5 * 3600)
        assert work is not None
        assert work()[""].share == pytest.approx(15 / 24, abs=1e-4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"{", "no JSON"),
        (b"\xff", "codec can't decode"),
        (b"[]", "no JSON object with hours"),
        (b" " * (FILE_BYTES_MAX + 1), f"larger than {FILE_BYTES_MAX} bytes"),
    ],
)
def test_a_bad_file_is_named_in_one_line(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    choice = f"workload_aware:fits={path}"
    with pytest.raises(ValueError, match=said) as raised:
        checked_eviction(choice)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    for settings in (WorkerSettings, KvStoreSettings):
        with pytest.raises(SystemExit):
            load_settings(settings, ["--eviction", choice], {})
        assert said in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match=said):
        ClusterSpec(eviction=choice)


def test_settings_keep_what_was_typed(file: Path) -> None:
    choice = f"workload_aware:fits={file}"
    assert load_settings(WorkerSettings, ["--eviction", choice], {}).eviction == choice
    assert load_settings(KvStoreSettings, ["--eviction", choice], {}).eviction == choice
    assert ClusterSpec(eviction=choice).eviction == choice
