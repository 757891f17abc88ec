"""Journals record completely what decisions are told: nothing that changes them is missed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from pinyon.batching import PromptQueue, StepScheduler
from pinyon.cli.main import main
from pinyon.core.errors import InvalidArgument, ResourceExhausted
from pinyon.core.journal import Codec, Journal
from pinyon.decisions import (
    JOURNAL_TYPES,
    Admission,
    FrontConfig,
    FrontDecisions,
    InstanceConfig,
    InstanceDecisions,
    journal_header,
    replay_journal,
)
from pinyon.decisions.front import FRONT_INPUTS
from pinyon.decisions.instance import INSTANCE_INPUTS, Eviction
from pinyon.paging import Reservations
from pinyon.routing.queue import RequestQueue
from pinyon.routing.rates import TenantRates

CONFIG = InstanceConfig(8, 16, 4, 64, 32, 2, 8)
READS = {
    "behind",
    "check",
    "check_integrity",
    "claimant",
    "decoded",
    "formed",
    "full",
    "growth",
    "shared",
    "held",
    "learned",
    "path",
    "lacks",
    "left",
    "levels",
    "need",
    "room",
    "room_for",
    "waits",
    "work",
}
READS |= {"next_deadline", "next_demand"}


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Admission, INSTANCE_INPUTS["admission"]),
        (Reservations, (*INSTANCE_INPUTS["reservations"], "reserve", "grow")),  # admission calls these two
        (Eviction, INSTANCE_INPUTS["eviction"]),
        (PromptQueue, INSTANCE_INPUTS["prompts"]),
        (StepScheduler, INSTANCE_INPUTS["steps"]),
        (RequestQueue, FRONT_INPUTS["queue"]),
        (TenantRates, FRONT_INPUTS["rates"]),
    ],
)
def test_every_method_that_changes_a_module_is_an_input(module: type, inputs: tuple[str, ...]) -> None:
    public = {name for name, _ in inspect.getmembers(module, inspect.isroutine) if not name.startswith("_")}
    assert public - READS == set(inputs)


def queue_lines() -> list[str]:
    config = FrontConfig(slots=1, limit=1)
    lines: list[str] = []
    journal = Journal(
        lambda line: lines.append(line + "\n"), lambda: 0.0, Codec(JOURNAL_TYPES), journal_header(config, service="lb")
    )
    queue = FrontDecisions(config, journal).queue
    for number, now_s in ((1, 0.0), (2, 0.5)):
        assert queue.reserve(number, "t", now_s) is None
        assert queue.enter(number, 10, now_s) is (number == 1)
    with pytest.raises(ResourceExhausted):
        queue.reserve(3, "t", 0.6)
    assert queue.leave(1.0) == 2
    assert not queue.cancel(2, 1.1)
    assert queue.leave(2.0) is None
    return lines


def test_a_queue_decides_the_same_again() -> None:
    seen = replay_journal(queue_lines())
    assert (seen.calls, seen.different) == (8, 0)


def test_a_queue_with_all_its_inputs_decides_the_same_again() -> None:
    config = FrontConfig(slots=2, limit=4, ageing_s=2.0)
    lines: list[str] = []
    journal = Journal(
        lambda line: lines.append(line + "\n"), lambda: 0.0, Codec(JOURNAL_TYPES), journal_header(config, service="lb")
    )
    queue = FrontDecisions(config, journal).queue
    for number, (priority, demand) in enumerate([(0, 1), (-1, 1), (5, 2), (0, 2)]):
        assert queue.reserve(number, "t", 0.0) is None
        assert not queue.enter(number, 10, 1.0, priority=priority, demand=demand, open=False), "there is no room"
    assert queue.next(1.5, [each for each in queue.waiting_demands if each != 1]) == 1
    assert queue.next(1.5, frozenset({1})) == 3
    assert queue.next(1.5, ()) is None
    queue.put_back(1, "t", 10, 1.0, priority=-1, demand=1)
    assert queue.cancel(2, 2.0)
    assert queue.leave(4.0, [2]) == 1
    assert queue.leave(5.0, [1]) is None
    assert queue.next(6.0) == 0
    seen = replay_journal(lines)
    assert (seen.calls, seen.different) == (16, 0)
    lines[0] = lines[0].replace('"ageing_s":2.0', '"ageing_s":0.0')
    assert replay_journal(lines).different, "a level of priority is worth nothing there"


def test_a_journal_of_before_there_was_ageing_is_read() -> None:
    lines = queue_lines()
    lines[0] = lines[0].replace(',"ageing_s":0.1', "")
    assert "ageing" not in lines[0]
    assert replay_journal(lines).different == 0


def test_a_journal_of_before_deadlines_were_gone_is_read() -> None:
    lines = queue_lines()
    assert lines[2].count('"a":[1,10,0.0]') == 1
    lines[2] = lines[2].replace('"a":[1,10,0.0]', '"a":[1,10,0.0],"n":{"priority":0,"demand":0,"deadline_s":Infinity}')
    seen = replay_journal(lines)
    assert (seen.calls, seen.different) == (8, 0)


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.jsonl"
    lines = queue_lines()
    path.write_text("".join(lines))
    assert main(["journal", str(path)]) == 0
    assert capsys.readouterr().out == "8 calls, all as recorded\n"
    path.write_text("".join(lines).replace('"slots":1', '"slots":2'))
    assert main(["journal", str(path)]) == 1
    out = capsys.readouterr().out
    assert "line 5: queue.enter: was {'r': False}, is {'r': True}" in out
    assert out.endswith("decided otherwise\n")


def test_the_command_reads_all_journals_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", str(tmp_path)]) == 1
    assert f"no journal in {tmp_path}" in capsys.readouterr().err
    for name in ("lb-0", "decode-0"):
        (tmp_path / f"{name}.jsonl").write_text("".join(queue_lines()))
    assert main(["journal", str(tmp_path)]) == 0
    told = ["decode-0.jsonl: 8 calls, all as recorded", "lb-0.jsonl: 8 calls, all as recorded"]
    assert capsys.readouterr().out.splitlines() == told
    (tmp_path / "lb-0.jsonl").write_text("".join(queue_lines()).replace('"slots":1', '"slots":2'))
    assert main(["journal", str(tmp_path)]) == 1
    assert "lb-0.jsonl: line 5: queue.enter: was" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"nonsense\n", b"\xff\xfe\n", b'{"pinyon_journal":2,"decisions":"lunch"}\n'])
def test_the_command_refuses_what_is_no_journal(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    assert main(["journal", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    assert main(["journal", str(tmp_path / "nowhere")]) == 1
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config", ['{"slots":1}', "[]", '{"slots":1,"limit":1,"ageing_s":-1}', '{"slots":1,"limit":1,"more":1}']
)
def test_a_configuration_that_does_not_fit_is_refused(config: str) -> None:
    with pytest.raises(InvalidArgument, match="configuration"):
        replay_journal([f'{{"pinyon_journal":2,"decisions":"front","config":{config}}}\n'])


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="known: lru"):
        InstanceDecisions(InstanceConfig(8, 16, 4, 64, 32, 2, 8, eviction="oracle"))
