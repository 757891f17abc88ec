"""Hosts for transfer tests on one machine: engines in processes, and network namespaces with veth pairs as NICs.

A *rail* is one network with one NIC of each host. It is direct (a veth pair, which shows the other end's faults as loss
of carrier), or goes through a bridge in its own namespace, which hides them."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import random
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.forks import Driven, forked
from tests.waiting import WAIT_S, wait_until

SEED = int(os.environ.get("PINYON_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
"""The seed of every random decision; the variable repeats those of an earlier run."""
PERIOD = 1048573
"""Bytes after which a pattern repeats: a prime, so that no slice, frame or stripe has the same bytes as another."""
_PREFIX = "pinyon-rails"
_numbers = itertools.count()

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Side = Literal["near", "far"]
Fault = Literal["near", "far", "unplugged"]
"""The break of a rail: near NIC down, far NIC down, or the cable pulled out of the bridge, which no NIC sees."""


def pattern(seed: int, nbytes: int) -> Bytes:
    """Returns odd bytes. The memory they overwrite is even, so every byte shows where it came from."""
    return np.resize(np.random.default_rng(seed).integers(0, 256, PERIOD, np.uint8) | 1, nbytes)


class SharedBuffer:
    """Memory that the test and its processes map, so that the test sees it after their end."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("pinyon-test")
        os.ftruncate(self._file, nbytes)
        self.map = mmap.mmap(self._file, nbytes)
        self.array = np.frombuffer(self.map, np.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Closes the file; the mapping itself goes with its last view."""
        os.close(self._file)


class HostProcess(Driven):
    """A process that a test drives, by default one with an engine; commands and answers are in order."""

    def __init__(
        self, config: dict[str, Any], netns: str = "", module: str = "tests.integration.transfer_host_process"
    ) -> None:
        """Returns at once; the first ``ask`` waits until the process is up. ``netns`` is its network namespace."""
        self._process = forked.driven(module, [json.dumps(config)], netns)
        self._buffer = b""
        self._owed = 1  # the line that says it is ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, timeout_s: float = WAIT_S, **arguments: Any) -> dict[str, Any]:
        """Runs a command in the process; returns its answer."""
        self.send(op, **arguments)
        return self.answer(timeout_s)

    def send(self, op: str, **arguments: Any) -> None:
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        self._owed += 1

    def answer(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Returns the answer to the last command, skipping earlier answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            value: dict[str, Any] = json.loads(self._line(deadline))
            assert "error" not in value, f"a command failed there: {value['error']}"
            self._owed -= 1
            if not self._owed:
                return value

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the process does not answer"
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the process has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


# --- namespaces ---


def why_no_rails() -> str:
    """Returns why hosts cannot be made here, or an empty string when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
            _ip("-n", name, "link", "add", "br0", "type", "bridge")
        finally:
            _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces, veth or bridges: {error.stderr.strip()}"
    return ""


def why_no_shaping() -> str:
    """Returns why a rail cannot be made slow here, or an empty string when it can."""
    if shutil.which("tc") is None:
        return "there is no tc command"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    _ip("netns", "add", name)
    try:
        _tc(name, "lo", 100)
    except subprocess.CalledProcessError as error:
        return f"no token bucket filter: {error.stderr.strip()}"
    finally:
        _ip("netns", "del", name)
    return ""


def _run(command: Sequence[str], stdin: str = "") -> str:
    return subprocess.run(command, input=stdin, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout


def _ip(*arguments: str, stdin: str = "") -> str:
    return _run(["ip", *arguments], stdin)


def _tc(netns: str, device: str, mbit: float) -> None:
    # A queue that holds all bytes that senders may have under way: a loss here would look like a stall.
    shape = f"root tbf rate {mbit}mbit burst 128kb limit 64mb".split()
    _run(["tc", "-n", netns, "qdisc", "replace", "dev", device, *shape])


def _remove_stale() -> None:
    """Removes the namespaces of killed test runs, which outlive their processes."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(_PREFIX + "-") and not Path("/proc", name.split("-")[2]).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another run does the same
                _ip("netns", "del", name)


class Rails:
    """Two hosts (namespaces) with a NIC per rail: ``eth0``, ``eth1``, … at 10.77.RAIL.1 (near) and .2 (far)."""

    def __init__(self, count: int = 4, *, bridged: bool = False) -> None:
        self.count = count
        self.bridged = bridged
        name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.names: dict[str, str] = {side: f"{name}-{side}" for side in ("near", "far", "wire")[: 3 if bridged else 2]}
        _remove_stale()
        self._made: list[str] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in self.names.values():
            _ip("netns", "add", name)
            self._made.append(name)
        near, far = self.names["near"], self.names["far"]
        hosts: dict[str, list[str]] = {"near": ["link set lo up"], "far": ["link set lo up"]}
        wire: list[str] = []
        links: list[str] = []
        for rail in range(self.count):
            for number, (side, commands) in enumerate(hosts.items(), 1):
                commands += [
                    f"link set eth{rail} addrgenmode none",
                    f"addr add 10.77.{rail}.{number}/24 dev eth{rail}",
                    f"link set eth{rail} up",
                ]
                if self.bridged:
                    links.append(
                        f"link add eth{rail} netns {self.names[side]} type veth "
                        f"peer name {side}{rail} netns {self.names['wire']}"
                    )
            if self.bridged:
                # Without a forward delay a port passes traffic as soon as it is plugged in.
                wire += [f"link add br{rail} type bridge forward_delay 0 mcast_snooping 0", f"link set br{rail} up"]
                wire += [f"link set {side}{rail} master br{rail} up" for side in hosts]
            else:
                links.append(f"link add eth{rail} netns {near} type veth peer name eth{rail} netns {far}")
        _ip("-batch", "-", stdin="\n".join(links))
        for side, commands in hosts.items():
            _ip("-n", self.names[side], "-batch", "-", stdin="\n".join(commands))
        if wire:
            _ip("-n", self.names["wire"], "-batch", "-", stdin="\n".join(wire))

    def nics(self, side: Side) -> list[dict[str, Any]]:
        """Returns the NICs of one host as in the engine's configuration."""
        last = 1 if side == "near" else 2
        return [
            {
                "name": f"eth{rail}",
                "transport": "tcp",
                "address": f"10.77.{rail}.{last}",
                "port": 0,
                "network": f"10.77.{rail}.0/24",
            }
            for rail in range(self.count)
        ]

    def shape(self, rail: int, mbit: float) -> None:
        """Limits the rate of both directions of the rail."""
        for side in ("near", "far"):
            _tc(self.names[side], f"eth{rail}", mbit)

    def breaks(self, rails: Sequence[int], fault: Fault) -> None:
        if fault == "unplugged":
            self._batch("wire", [f"link set near{rail} nomaster" for rail in rails])
        else:
            self._batch(fault, [f"link set eth{rail} down" for rail in rails])

    def mends(self, rails: Sequence[int], fault: Fault) -> None:
        if fault == "unplugged":
            self._batch("wire", [f"link set near{rail} master br{rail}" for rail in rails])
        else:
            self._batch(fault, [f"link set eth{rail} up" for rail in rails])
        # The kernel notices a carrier with a delay; until then it drops packets.
        wait_until(lambda: all(self._link_is_up(rail) for rail in rails), "the links are up")

    def _link_is_up(self, rail: int) -> bool:
        return all(
            " state UP " in _ip("-n", self.names[side], "link", "show", f"eth{rail}") for side in ("near", "far")
        )

    def _batch(self, where: str, commands: list[str]) -> None:
        _ip("-n", self.names[where], "-batch", "-", stdin="\n".join(commands))

    def close(self) -> None:
        """Removes the namespaces, after the processes inside have ended."""
        while self._made:
            _ip("netns", "del", self._made.pop())


def carried(pid: int) -> dict[str, int]:
    """Returns the bytes received and sent so far by each NIC of the process's namespace (running or not)."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    counters = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}
    return {name: int(values[0]) + int(values[8]) for name, values in counters.items() if name.startswith("eth")}
