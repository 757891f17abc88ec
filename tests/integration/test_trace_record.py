"""``pinyon trace record`` against load balancers in this process: the trace's content, and what it must not contain."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from pinyon.cli import main
from pinyon_lab.traces import TraceFile
from tests.integration.lb_harness import WAIT_S, Bench, running_lb, spin

SECRETS = ("heron", "magpie", "anna@example.org", "tea-time", "acme")


async def recording(bench: Bench, out: Path, *more: str) -> asyncio.Task[int]:
    before = bench.lb.recorder.recordings
    task = asyncio.create_task(
        asyncio.to_thread(main, ["trace", "record", str(out), "--lb", bench.endpoints["grpc"], *more])
    )
    await spin(lambda: bench.lb.recorder.recordings > before or task.done())
    return task


async def test_a_trace_says_what_is_shared_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "live.jsonl.gz"
    async with running_lb() as bench:
        await bench.complete("before it began")
        task = await recording(bench, out, "--requests", "4")
        who = {"x-pinyon-user": "anna@example.org", "x-pinyon-session": "tea-time"}
        prompt = "heron " * 20
        await bench.complete(prompt, who, max_tokens=5)
        await bench.complete(prompt + "magpie", who, max_tokens=7)
        await bench.complete("magpie", {"x-pinyon-type": "search"}, max_tokens=2)
        await bench.complete(prompt, cache_salt="other", max_tokens=1)
        assert await task == 0
        await spin(lambda: not bench.lb.recorder.recordings)
    assert f"4 requests of 1 load balancer in {out}" in capfd.readouterr().err
    trace = TraceFile(out)
    rows = list(trace.rows())
    assert (trace.broken, trace.format.name) == (0, "qwen")
    assert [row.output_tokens for row in rows] == [5, 7, 2, 1]
    assert [row.kind for row in rows] == ["completion", "completion", "search", "completion"]
    assert [row.user for row in rows] == ["1", "1", "2", "2"], "of the others only their tenant is known"
    assert [row.parent for row in rows] == ["", "0", "", ""]
    assert rows[0].time_s == 0.0
    assert [row.time_s for row in rows] == sorted(row.time_s for row in rows)
    first, second, _, salted = rows
    shared = first.input_tokens // 16
    assert second.blocks[:shared] == first.blocks[:shared] == tuple(range(shared))
    assert not set(salted.blocks) & set(first.blocks)
    ids = [block for row in rows for block in row.blocks]
    assert set(ids) == set(range(max(ids) + 1))
    text = gzip.decompress(out.read_bytes()).decode()
    assert not any(secret in text for secret in SECRETS)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


async def test_two_load_balancers_make_one_trace(tmp_path: Path) -> None:
    out = tmp_path / "live.jsonl"
    async with running_lb() as one, running_lb() as other:
        task = await recording(one, out, "--lb", other.endpoints["grpc"], "--requests", "4")
        await spin(lambda: other.lb.recorder.recordings == 1)
        for number in range(4):
            await (one, other)[number % 2].complete("heron " * 20, max_tokens=number + 1)
        assert await task == 0
    rows = list(TraceFile(out).rows())
    assert [row.output_tokens for row in rows] == [1, 2, 3, 4], "in order of their coming"
    assert len({row.blocks for row in rows}) == 1


async def test_requests_are_in_order_of_their_coming(tmp_path: Path) -> None:
    """Load balancers report requests when they end, but the trace has them in order of arrival."""
    out = tmp_path / "live.jsonl"
    async with running_lb(workers=1) as bench:
        bench.workers[0].hold(1)
        task = await recording(bench, out, "--requests", "2")
        late = asyncio.ensure_future(bench.complete("heron", max_tokens=2))
        await bench.workers[0].until(lambda: len(bench.workers[0].open) == 1)
        await bench.complete("magpie", max_tokens=1)
        bench.workers[0].go.set()
        await late
        assert await task == 0
    assert [row.output_tokens for row in TraceFile(out).rows()] == [2, 1]


def spooled(process: asyncio.subprocess.Process, folder: Path) -> bool:
    """Returns whether the process has written rows to its unnamed file, after which all earlier rows are noted."""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(link.readlink()).startswith(str(folder)) and link.stat().st_size:
                return True
    return False


async def test_ctrl_c_finishes_the_file(tmp_path: Path) -> None:
    out, asked = tmp_path / "live.jsonl", 0
    program = [sys.executable, "-c", "import sys; from pinyon.cli import main; sys.exit(main())"]
    async with running_lb() as bench:
        process = await asyncio.create_subprocess_exec(
            *program, "trace", "record", str(out), "--lb", bench.endpoints["grpc"], stderr=asyncio.subprocess.PIPE
        )
        pidfd = os.pidfd_open(process.pid)
        try:
            await spin(lambda: bench.lb.recorder.recordings or process.returncode is not None)
            async with asyncio.timeout(WAIT_S):
                while not spooled(process, tmp_path):
                    await bench.complete("heron " * 200, max_tokens=1 + asked % 3)
                    asked += 1
                for _ in range(3):  # as an impatient user would
                    # asyncio's send_signal could take the exit status that another caller awaits.
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGINT)
                    await asyncio.sleep(0.001)
                _, said = await process.communicate()
        finally:
            os.close(pidfd)
            if process.returncode is None:
                process.kill()
                await process.wait()
        await spin(lambda: not bench.lb.recorder.recordings)
    trace = TraceFile(out)
    rows = list(trace.rows())
    assert (process.returncode, said.decode()) == (0, f"pinyon: {len(rows)} requests of 1 load balancer in {out}\n")
    assert trace.broken == 0
    assert 0 < len(rows) <= asked
    assert [row.output_tokens for row in rows] == [1 + number % 3 for number in range(len(rows))]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


async def test_the_end_of_the_load_balancer_keeps_what_came(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "live.jsonl"
    async with running_lb() as bench:
        task = await recording(bench, out, "--seconds", "600")
        await bench.complete("heron", max_tokens=2)
    assert await task == 1
    assert "ended it" in capfd.readouterr().err
    assert len(list(TraceFile(out).rows())) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [(("--lb", "127.0.0.1:1"), "no load balancer answers at 127.0.0.1:1"), (("--seconds", "0.3"), "there is no trace")],
)
async def test_what_comes_to_nothing_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    async with running_lb() as bench:
        assert await (await recording(bench, tmp_path / "live.jsonl", *more)) == 1
        await spin(lambda: not bench.lb.recorder.recordings)
    assert said in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


async def test_where_nothing_can_be_written_it_does_not_begin(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_lb() as bench:
        for out, said in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "No such file")):
            assert await (await recording(bench, out)) == 1
            assert said in capfd.readouterr().err
        address = bench.endpoints["grpc"]
        assert await (await recording(bench, tmp_path / "x", "--lb", address)) == 1
        assert "each load balancer once" in capfd.readouterr().err


async def test_standard_output_has_the_rows(capfd: pytest.CaptureFixture[str]) -> None:
    async with running_lb() as bench:
        task = await recording(bench, Path("-"), "--requests", "1")
        await bench.complete("heron", max_tokens=2)
        assert await task == 0
    assert json.loads(capfd.readouterr().out)["output_length"] == 2
