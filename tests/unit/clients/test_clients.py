"""``./dev clients`` tells successful, failed and unavailable clients apart."""

import fcntl
import json
import sys
import zipfile

import pytest

from tests.clients import environment
from tests.clients.child import TooLate, run_child
from tests.clients.clients import CLIENTS, Target, Wrong
from tests.clients.environment import Environment, NotHad, NotInstalled, Step

TOTALS = {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}


def wheel(folder, name, needs=()):
    """Writes a package of that name, version 1.0, without any code."""
    info = f"{name}-1.0.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(lines))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of wheels, which is all that pip knows."""
    (folder := tmp_path / "wheels").mkdir()
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def test_a_packages_needs_are_installed_but_for_what_is_left_out(wheels):
    wheel(wheels, "big", ["small", "huge>=1", 'gone; extra == "more"', "old; python_version < '3'"])
    wheel(wheels, "small")
    made = Environment("made", (Step(("big==1.0",), alone=True), Step(needs_of="big", without=("huge",))))
    said = []
    made.make(120, said.append)
    assert {path.name for path in made.folder.rglob("*.dist-info")} == {"big-1.0.dist-info", "small-1.0.dist-info"}
    made.make(0, said.append)
    assert len(said) == 1


def test_no_index_with_the_package_is_not_a_failure(wheels):
    with pytest.raises(NotHad, match="no-such-package"):
        Environment("made", (Step(("no-such-package==1.0",)),)).make(120, print)


def test_a_version_that_is_not_there_is_a_failure(wheels):
    wheel(wheels, "small")
    with pytest.raises(NotInstalled, match=r"small==2\.0") as caught:
        Environment("made", (Step(("small==2.0",)),)).make(120, print)
    assert not isinstance(caught.value, NotHad)


def test_what_a_child_left_behind_is_killed(tmp_path):
    lock = f"import fcntl, time; file = open({str(tmp_path / 'lock')!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX)"
    outlives = f"time.sleep(60); open({str(tmp_path / 'alive')!r}, 'w')"
    left = f"{lock}; print('locked', flush=True); {outlives}"
    child = (
        "import subprocess, sys; left = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE); left.stdout.readline()"
    )
    program = [sys.executable, "-c", child, sys.executable, "-c", left]
    assert run_child(program, tmp_path / "output", 120) == 0
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert not (tmp_path / "alive").exists()


def test_a_child_that_does_not_end_is_stopped(tmp_path):
    with pytest.raises(TooLate):
        run_child([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "output", 0.2)


@pytest.mark.parametrize(
    ("client", "name", "good", "bad"),
    [
        ("vllm-chat", "vllm.json", {"completed": 20, "failed": 0}, {"completed": 19, "failed": 1}),
        ("vllm-chat", "vllm.json", {"total_output_tokens": 160}, {"total_output_tokens": 159}),
        ("aiperf-chat", "profile_export_aiperf.json", {"error_summary": []}, {"error_summary": [{"count": 1}]}),
        ("aiperf-chat", "profile_export_aiperf.json", {"request_count": {"avg": 12}}, {"request_count": {"avg": 11}}),
    ],
    ids=["vllm requests", "vllm tokens", "aiperf errors", "aiperf requests"],
)
def test_a_report_with_less_than_asked_for_is_refused(tmp_path, client, name, good, bad):
    whole = {
        "vllm-chat": {"completed": 20, "failed": 0, "total_input_tokens": 1290, "total_output_tokens": 160},
        "aiperf-chat": {
            "error_summary": [],
            "request_count": {"avg": 12},
            "request_error_rate": {"avg": 0},
            "total_usage_prompt_tokens": {"avg": 768},
            "total_usage_completion_tokens": {"avg": 96},
        },
    }[client]
    target = Target("http://127.0.0.1", tmp_path)
    (tmp_path / name).write_text(json.dumps({**whole, **good}))
    CLIENTS[client].report(target)
    (tmp_path / name).write_text(json.dumps({**whole, **bad}))
    with pytest.raises(Wrong):
        CLIENTS[client].report(target)


@pytest.mark.parametrize("made", [TOTALS, {**TOTALS, "successful": 11, "errored": 1}], ids=["all", "one failed"])
def test_guidellm_counts_what_it_made(tmp_path, made):
    tokens = {
        f"{kind}_token_count": {"successful": {"total_sum": each * 11}}
        for kind, each in {"prompt": 64, "output": 8}.items()
    }
    metrics = {"request_totals": {**TOTALS, "successful": 11, "total": 11}, **tokens}
    report = {"benchmarks": [{"scheduler_metrics": {"requests_made": made}, "metrics": metrics}]}
    (tmp_path / "guidellm.json").write_text(json.dumps(report))
    target = Target("http://127.0.0.1", tmp_path)
    if made == TOTALS:
        assert "88 generated" in CLIENTS["guidellm-chat"].report(target)
    else:
        with pytest.raises(Wrong, match="requests"):
            CLIENTS["guidellm-chat"].report(target)
