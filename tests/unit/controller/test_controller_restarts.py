"""The restart hook: its environment, how often it runs, and what ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import pytest

from pinyon.federation.view import LbInfo
from services.controller.restarts import LbRestarts

INFO = LbInfo("eu-0", "1", "eu", "10.0.0.1:8001", "http://eu.example.org")


class Runs:
    """A runner whose pauses end when the test says so."""

    def __init__(self, tmp_path: Path, script: str, attempts: int = 3, timeout_s: float = 60.0) -> None:
        path = tmp_path / "hook.py"
        path.write_text(script)
        self.outcomes: list[bool] = []
        self.pauses: list[float] = []
        self.paused: asyncio.Queue[float] = asyncio.Queue()
        self.go: asyncio.Queue[None] = asyncio.Queue()
        command = f"{sys.executable} {path} {tmp_path}/out"
        self.restarts = LbRestarts(command, timeout_s, attempts, self.outcomes.append, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.paused.put_nowait(seconds)
        await self.go.get()

    async def pause(self) -> float:
        async with asyncio.timeout(90):
            return await self.paused.get()


async def test_it_is_told_which_and_run_later_each_time(tmp_path, caplog):
    script = (
        "import os, sys; print('on its way'); open(sys.argv[1], 'a').write("
        "' '.join(os.environ['PINYON_FAILED_' + name] for name in "
        "('LB_ID', 'REGION', 'GRPC_ADDRESS', 'HTTP_URL', 'ATTEMPT')) + '\\n')"
    )
    runs = Runs(tmp_path, script)
    with caplog.at_level(logging.INFO):
        runs.restarts.failed(INFO)
        runs.restarts.failed(INFO)
        pauses = []
        for _ in range(3):
            pauses.append(await runs.pause())
            runs.go.put_nowait(None)
        (task,) = runs.restarts._tasks.values()
        await asyncio.wait_for(task, 60)
    assert pauses == [10.0, 20.0, 40.0]
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == [f"eu-0 eu 10.0.0.1:8001 http://eu.example.org {attempt}" for attempt in (1, 2, 3)]
    assert runs.outcomes == [True] * 3
    assert "on its way" in caplog.text
    assert "not started again any more" in caplog.text


async def test_who_is_back_is_not_started_again(tmp_path):
    runs = Runs(tmp_path, "", attempts=1)
    runs.restarts.failed(INFO)
    await runs.pause()
    (task,) = (each for each in asyncio.all_tasks() if each.get_name() == "restart eu-0")
    runs.restarts.back("eu-0")
    runs.restarts.back("nobody")
    assert runs.restarts.restarting == ()
    runs.go.put_nowait(None)
    async with asyncio.timeout(90):
        await asyncio.wait({task})
    assert task.cancelled()
    runs.go.get_nowait()
    runs.restarts.failed(INFO)
    assert await runs.pause() == 10.0
    await runs.restarts.close()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; print('no machine left'); sys.exit(3)", "ended with 3: no machine left"),
        ("import time; time.sleep(600)", "took longer"),
    ],
)
async def test_one_that_goes_wrong_is_logged(tmp_path, caplog, script, said):
    runs = Runs(tmp_path, script, timeout_s=0.2 if said == "took longer" else 60.0)
    runs.restarts.failed(INFO)
    await runs.pause()
    assert runs.outcomes == [False]
    assert said in caplog.text
    await runs.restarts.close()


async def test_what_it_started_may_go_on_with_its_output(tmp_path):
    """A daemon that the hook started holds the pipe's other end."""
    child = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "open(sys.argv[1], 'w').write(str(p.pid)); print('started')"
    )
    runs = Runs(tmp_path, child)
    runs.restarts.failed(INFO)
    await runs.pause()
    assert runs.outcomes == [True]
    await runs.restarts.close()
    import signal

    os.kill(int((tmp_path / "out").read_text()), signal.SIGKILL)  # raises if the daemon had been killed


async def test_a_command_that_is_not_there(caplog):
    outcomes: list[bool] = []
    restarts = LbRestarts("/no/such/program", 5.0, 1, outcomes.append, lambda _: asyncio.sleep(0))
    restarts.failed(INFO)
    (task,) = restarts._tasks.values()
    await asyncio.wait_for(task, 60)
    assert outcomes == [False]
    assert "cannot be run" in caplog.text
    for blank in ("", "  "):
        nothing = LbRestarts(blank, 5.0, 1)
        nothing.failed(INFO)
        assert nothing.restarting == ()


async def test_a_killed_hook_is_reaped_also_when_cancelled(tmp_path, monkeypatch):
    runs = Runs(tmp_path, "import time; time.sleep(600)", timeout_s=1.0)
    runs.restarts.failed(INFO)
    (task,) = runs.restarts._tasks.values()
    killed = []
    killpg = os.killpg

    def kill(pid: int, number: int) -> None:
        """Kills the process a little after its task is cancelled."""
        killed.append(pid)
        task.cancel()
        asyncio.get_running_loop().call_soon(killpg, pid, number)

    monkeypatch.setattr(os, "killpg", kill)
    await asyncio.wait((task,), timeout=60)
    assert task.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(killed[0], 0)
    await runs.restarts.close()
