"""The laboratory's commands refuse nonsense in one line, and write nothing."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pinyon.cli import main
from tests.unit.cli.lab_commands import mooncake, qwen, write

CACHE = "simulate-cache m --capacity 4"
FEW_RULES = "simulate m --instances 2 --cache-tokens 1024"
MACHINE = "simulate m --model tiny --instances 2"
MISSING = "prefill-reference has no memory of its own: give --cache-tokens, or a --model"
US = "simulate --regions us:1:2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write(folder / "m", mooncake(*([number] for number in range(300))))
    write(folder / "q", qwen())
    write(folder / "once", qwen(1))
    write(folder / "broken", ['{"hash_ids": 3}'])
    write(folder / "azure", ["TIMESTAMP,ContextTokens,GeneratedTokens"])
    return folder


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("simulate m --model h100 --instances 2", "no such profile; known: 910b"),
        ("simulate m --model tiny", "--instances, or --prefill-instances and --decode-instances, is missing"),
        ("simulate m --model tiny --prefill-instances 2", "go together"),
        (f"{MACHINE} --pipeline 2", "--pipeline is of --prefill-instances"),
        (f"{MACHINE} --order longest", "known: fifo, shortest_in_time"),
        (f"{MACHINE} --shrink 3", "--shrink must divide the trace's 512 tokens"),
        (f"{MACHINE} --batching no", "known: fcfs"),
        (f"{MACHINE} --sizes 4-2", "LEAST-MOST"),
        (f"{MACHINE} --sizes 1-{'9' * 5000}", "LEAST-MOST"),
        (f"{MACHINE} --cache-tokens 100", "at least one block of 512"),
        (f"{MACHINE} --pool ssd --pool-tokens 511", "at least one block of 512"),
        (f"{MACHINE} --utilisation 2", "--utilisation must be from 0.001 to 1"),
        (f"{MACHINE} --clients 2 --rate 9", "there is no --rate"),
        ("simulate m --instances 2", f"pinyon: {MISSING}"),
        ("simulate m --cache-tokens 1024", "--instances is missing\n"),
        ("simulate m", f"pinyon: --instances is missing; {MISSING}"),
        ("compare m", f"pinyon: --instances is missing; {MISSING}"),
        ("plan m", f"pinyon: {MISSING}"),
        ("simulate m --tokens-max 0", "--tokens-max must be from 1 to 2,147,483,648, got 0"),
        (f"{FEW_RULES} --pool dram --pool-tokens 512", "a pool of DRAM is the caches of"),
        (f"{FEW_RULES} --pool-tokens 512", "--pool-tokens is of a --pool"),
        (f"{FEW_RULES} --pipeline 7", "--pipeline is of models of whole machines"),
        (f"{FEW_RULES} --sizes 1-3", "--sizes is of models of whole machines"),
        (f"{FEW_RULES} --steps prefill_first", "--steps is of models"),
        (f"{FEW_RULES} --shed-tbt 0.02", "--shed-tbt is of models of whole machines"),
        ("compare m --instances 2 --cache-tokens 9999 --shed-tbt 0.02", "--shed-tbt is of models of whole machines"),
        ("plan m --cache-tokens 9999 --shed-tbt 0.02", "--shed-tbt is of models of whole machines"),
        (f"{MACHINE} --shed-tbt 0", "--shed-tbt must be from 1e-06"),
        (f"simulate m --instances 1{'0' * 400} --cache-tokens 1024", "--instances must be from"),
        (f"{FEW_RULES} --policy best", "known: "),
        (f"{FEW_RULES} --picture nowhere/a.svg", "cannot write nowhere/a.svg"),
        (f"{FEW_RULES} --warm-up 300", "none of the trace's 300 requests to count"),
        ("compare m --model tiny --instances 3 --policy random --policy random", "named twice"),
        ("plan m --model tiny --sizes 2-4", "--sizes is of simulate"),
        ("plan m --model tiny --clients 3", "--clients is of simulate"),
        ("simulate-cache m --capacity 0", "--capacity must be at least 1"),
        ("simulate-cache none --capacity 4", "no trace file"),
        (f"{CACHE} --policy nonsense", "known: lru, workload_aware"),
        (f"{CACHE} --policy workload_aware:life=1", "no option 'life'"),
        (f"{CACHE} --policy workload_aware:fits=once", "fits of 'once': no JSON object with hours"),
        (f"{CACHE} --format azure", "has no blocks"),
        (f"{CACHE} --nodes 0", "nodes must be from 1 to 1024, got 0"),
        (f"{CACHE} --nodes 2 --router nonsense", "known: cache_affinity, round_robin"),
        (f"{CACHE} --nodes 2 --router global --last-copies", "each block exists once"),
        (f"{CACHE} --router global", "add --nodes"),
        (f"{CACHE} --dram -1", "--dram must be at least 0"),
        (f"{CACHE} --dram 4 --policy belady", "none has belady"),
        (f"{CACHE} --dram 4 --nodes 2", "give one of them"),
        ("simulate --regions us:1", "NAME:INSTANCES:CLIENTS"),
        ("simulate --regions us:1:2:3:4:5", "NAME:INSTANCES:CLIENTS"),
        ("simulate --regions us:x:2", "numbers from 0"),
        ("simulate --regions us:1:2,us:1:2", "there twice"),
        ("simulate --regions mars:1:2", "mars:1:2:HOUR"),
        (f"{US}:nan", "no number"),
        (f"{US}:30", "hour from 0 to 24"),
        ("simulate --regions us:0:2", "has instances"),
        ("simulate --regions us:1:0", "nobody has clients"),
        (f"{US} --system none", "gateway"),
        (f"{US} --workload chess", "wildchat"),
        (f"{US} --routing none", "known: skywalker"),
        (f"{US} --day 1", "--day must be"),
        (f"{US} --round-trip us+eu=1", "two of the regions"),
        (f"{US},eu:1:2 --round-trip us+eu=x", "no number of ms"),
        (f"{US} --rate 2", "--rate says nothing"),
        (f"{US} trace.jsonl", "no trace is read"),
        ("simulate --workload tree trace.jsonl", "--workload is of --regions"),
        ("simulate", "a trace is missing, or --regions"),
        ("trace analyze q --figure 3", "no figure '3'; known: 4, 5"),
        ("trace analyze q --window-s 0", "--window-s must be from 0.001 to 1e+09"),
        ("trace analyze q --memory-gib nan", "--memory-gib must be from 1e-06 to 1,048,576"),
        ("trace analyze q --memory-gib 0.00001", "may need more than"),
        ("trace analyze q --window-s 0.001", "windows of 0.001 s"),
        ("trace analyze q --out /dev/null/x", "/dev/null/x: Not a directory"),
        ("trace scale q out --factor 0", "--factor must be above 0 and at most 1"),
        ("trace scale q out --factor nan", "--factor must be above 0 and at most 1"),
        ("trace scale q none/out --factor 0.5", "No such file"),
        ("trace fit none out.json", "no trace file at none"),
        ("trace fit once out.json", "too few blocks are used again for a fit in any hour"),
        ("trace fit q none/out.json", "none/out.json: No such file or directory"),
        ("trace fit q out.json --memory-gib 0", "--memory-gib must be from 1e-06 to"),
        ("trace generate", "a profile and a file are needed"),
        ("trace generate qwen-a", "a profile and a file are needed"),
        ("trace generate qwen-a OUT --vary think_s=1", "think_s of profile qwen-a must be from 250 to 510, got 1"),
        ("trace generate qwen-a OUT --vary name=1", "profile qwen-a has no parameter 'name'; known: users"),
        ("trace generate qwen-a OUT --vary think_s", "--vary takes NAME=VALUE with a number, got 'think_s'"),
        ("trace generate qwen-a OUT --vary think_s=long", "--vary takes NAME=VALUE with a number, got 'think_s=long'"),
        ("trace generate qwen-a none/OUT", "OUT: No such file or directory"),
        ("trace generate qwen-a .", "cannot write .: it is there and no file"),
        ("reproduce", "a figure's name is needed; there are: mooncake-fig1"),
        ("reproduce nonsense", "no figure 'nonsense'; there are: mooncake-fig1"),
        ("reproduce mooncake-fig12", "mooncake-fig12 is made by `./dev bench transfer --fig12`"),
        (
            "reproduce mooncake-fig9",
            "traces that are not there: conversation (mooncake_conversation.jsonl[.gz]), synth",
        ),
        ("reproduce mooncake-fig9 --trace nonsense=x", "with one of conversation, synthetic, toolagent"),
        ("reproduce mooncake-fig9 --trace conversation", "--trace takes NAME=FILE"),
        ("reproduce mooncake-fig9 --traces /nowhere/at/all", "no folder of traces at /nowhere/at/all"),
    ],
)
def test_what_makes_no_sense_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert main(shlex.split(asked)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(folder.iterdir()) == before
