"""Two hosts with four NICs each: transfers use all of them, and survive NICs that fail in mid-transfer.

The hosts are network namespaces, the NICs veth pairs. Where a fault must fall in mid-transfer, the rails are slowed
down. Faults come when interface counters show that so many bytes have moved. The seed of the random points is printed;
``PINYON_CHAOS_SEED`` repeats them. With ``PINYON_CHAOS_ROUNDS`` set every kind of fault takes one, two and three NICs
down, else each takes some of these."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.integration.transfer_hosts import (
    PERIOD,
    SEED,
    Fault,
    HostProcess,
    Rails,
    SharedBuffer,
    carried,
    pattern,
    why_no_rails,
    why_no_shaping,
)
from tests.waiting import WAIT_S, wait_until

NO_RAILS = why_no_rails()
NO_SHAPING = NO_RAILS or why_no_shaping()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_RAILS), reason=NO_RAILS)]
shaped = pytest.mark.skipif(bool(NO_SHAPING), reason=NO_SHAPING)

LONG = bool(os.environ.get("PINYON_CHAOS_ROUNDS"))
MIB = 1 << 20
SIZE = 128 * MIB
MBIT = 240
"""The rate of a slow rail in each direction, at which a transfer lasts long enough for a fault to fall into it."""
LIMITS = {"stall_s": 1.0, "connect_s": 1.0, "base_deadline_s": 60.0}
PATIENT = LIMITS | {"stall_s": 10.0, "connect_s": 10.0}
"""Limits for tests without faults: a machine that is busy elsewhere for a second is no fault."""
PART, GAP = 3 * MIB, 64
"""A request's range and the bytes around it that must stay untouched."""
NICS = ("eth0", "eth1", "eth2", "eth3")


class Hosts:
    """The two hosts: the near one moves data to and from the far one, and the test maps the memory of both."""

    def __init__(self, rng: random.Random, bridged: bool, mbit: float, **settings: Any) -> None:
        self._seeds = rng
        self.here, self.there = SharedBuffer(SIZE), SharedBuffer(SIZE)
        self.rails = Rails(bridged=bridged)
        self._processes: list[HostProcess] = []
        try:
            if mbit:
                for rail in range(self.rails.count):
                    self.rails.shape(rail, mbit)
            self.near = self._start("near", settings)
            self.far = self._start("far", settings)
            self.near.ask("region", path=self.here.path, nbytes=SIZE)
            self.key = self.far.ask("region", path=self.there.path, nbytes=SIZE)["key"]
            self.segment = self.far.ask("descriptor")["segment"]
        except BaseException:
            self.close()
            raise

    def _start(self, side: Any, settings: dict[str, Any]) -> HostProcess:
        nics = self.rails.nics(side)
        config = {"host": nics[0]["address"], "nics": nics, "limits": LIMITS} | settings
        self._processes.append(HostProcess(config, self.rails.names[side]))
        return self._processes[-1]

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self.rails.close()
        self.here.close()
        self.there.close()

    def begin(self, parts: int = 24, length: int = PART) -> Transfer:
        """Begins a transfer with WRITEs and READs, half each, in random order."""
        return Transfer(self, parts, length, self._seeds)

    def paths(self) -> dict[str, dict[str, Any]]:
        """Returns the near engine's figures by its NIC."""
        return {one["local_nic"]: one for one in self.near.ask("stats")["paths"]}

    def all_carry(self, nics: Sequence[str] = NICS, least: int = MIB) -> None:
        """Checks that new transfers complete, and after a while all of these NICs carry them."""
        begun = carried(self.near.pid)

        def moved() -> bool:
            self.begin(8).completes()
            now = carried(self.near.pid)
            return all(now[nic] - begun[nic] >= least for nic in nics)

        # Pauses have grown with the time that a NIC was down.
        wait_until(moved, f"all of {nics} carry bytes again", 3 * WAIT_S)


class Transfer:
    """One batch of disjoint ranges, under way."""

    def __init__(self, hosts: Hosts, parts: int, length: int, rng: random.Random) -> None:
        self._hosts = hosts
        self._length = length
        self.nbytes = parts * length
        self._even = rng.randrange(128) * 2
        data = pattern(rng.randrange(1 << 32), PERIOD)
        order = rng.sample(range(parts), parts)
        cell = length + GAP
        assert parts * cell + GAP <= SIZE
        self._parts: list[tuple[str, int, int]] = []
        self._size = parts * cell + GAP
        hosts.here.array[: self._size] = hosts.there.array[: self._size] = self._even
        for number, target in enumerate(order):
            opcode = "WRITE" if number % 2 else "READ"
            here, there = number * cell + GAP, target * cell + GAP
            source = hosts.here.array[here:] if opcode == "WRITE" else hosts.there.array[there:]
            source[:length] = np.resize(np.roll(data, number * 7919), length)
            self._parts.append((opcode, here, there))
        self._before = carried(hosts.near.pid)
        batch = [[opcode, 0, here, hosts.key, there, length] for opcode, here, there in self._parts]
        self.handle = hosts.near.ask("submit", remote=hosts.segment, batch=batch)["handle"]

    def shares(self) -> dict[str, int]:
        """Returns the bytes that each of the near host's NICs has carried since the start, in both directions."""
        now = carried(self._hosts.near.pid)
        return {nic: now[nic] - self._before[nic] for nic in NICS}

    def reach(self, share: float) -> None:
        """Waits until that share of the bytes has crossed the wire."""
        try:
            wait_until(lambda: sum(self.shares().values()) >= share * self.nbytes, f"{share:.0%} moved")
        except AssertionError as error:
            raise AssertionError(self._hosts.near.ask("progress", handle=self.handle)) from error

    def ends(self) -> dict[str, Any]:
        answer = self._hosts.near.ask("wait", 4 * WAIT_S, handle=self.handle)
        assert answer["final"]
        return answer

    def completes(self) -> None:
        """Waits for the end; checks that all requests completed, the data is right, and nothing else was touched."""
        outcomes = self.ends()["outcomes"]
        assert outcomes == [["completed", "NONE", len(self._parts)]]
        here, there, length = self._hosts.here.array, self._hosts.there.array, self._length
        for _, near, far in self._parts:
            assert np.array_equal(here[near : near + length], there[far : far + length]), "COMPLETED with wrong data"
        for memory, starts in ((here, [one[1] for one in self._parts]), (there, [one[2] for one in self._parts])):
            ends = (0, *(start + length for start in sorted(starts)))
            for end, start in zip(ends, (*sorted(starts), self._size), strict=True):
                assert (memory[end:start] == self._even).all(), "bytes outside the ranges were written"


@pytest.fixture
def rng() -> random.Random:
    print(f"PINYON_CHAOS_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture
def make_hosts(rng: random.Random) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(*, bridged: bool = False, mbit: float = 0, **settings: Any) -> Hosts:
        made.append(Hosts(rng, bridged, mbit, **({"transports": ["tcp"]} | settings)))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@shaped
@pytest.mark.parametrize(("parts", "length"), [(2, 63 * MIB), (40, PART)], ids=["large", "batch"])
def test_all_nics_carry_their_share(make_hosts, parts, length) -> None:
    hosts = make_hosts(mbit=MBIT, limits=PATIENT)
    hosts.begin(parts, length).completes()  # measures the rates
    before = {nic: one["bytes"] for nic, one in hosts.paths().items()}
    transfer = hosts.begin(parts, length)
    transfer.completes()
    shares = transfer.shares()
    print(shares)
    assert sum(shares.values()) > transfer.nbytes
    assert min(shares.values()) > transfer.nbytes / 10
    counted = {nic: one["bytes"] - before[nic] for nic, one in hosts.paths().items()}
    assert sum(counted.values()) == transfer.nbytes
    assert min(counted[nic] for nic in NICS) > transfer.nbytes / 10
    assert all(one["usable"] and not one["failures"] for one in hosts.paths().values())


def test_all_nics_carry_at_full_speed(make_hosts) -> None:
    """The processors are the limit here and shares are random, but each NIC carries some bytes in the end."""
    hosts = make_hosts(limits=PATIENT)
    transfer = hosts.begin(2, 63 * MIB)
    transfer.completes()
    print(transfer.shares())
    hosts.all_carry()


@shaped
@pytest.mark.parametrize(
    ("fault", "bridged", "counts"),
    [("near", False, (1, 3)), ("far", False, (2,)), ("far", True, (3, 1)), ("unplugged", True, (2, 3))],
    ids=["near", "far", "far-bridged", "unplugged"],
)
def test_nics_fail_in_mid_transfer_and_come_back(make_hosts, rng, fault: Fault, bridged, counts) -> None:
    hosts = make_hosts(bridged=bridged, mbit=MBIT)
    for count in (1, 2, 3) if LONG else counts:
        rails = rng.sample(range(4), count)
        back_meanwhile = rng.random() < 0.5
        fails_at, back_at = rng.uniform(0.05, 0.4), rng.uniform(0.5, 0.9)
        print(f"{rails} fail at {fails_at:.2f}, back at {back_at if back_meanwhile else 1:.2f}")
        begun = time.monotonic()
        transfer = hosts.begin()
        transfer.reach(fails_at)
        hosts.rails.breaks(rails, fault)
        if back_meanwhile:
            transfer.reach(back_at)
            hosts.rails.mends(rails, fault)
        transfer.completes()
        print(f"    {transfer.shares()} in {time.monotonic() - begun:.2f} s", flush=True)
        if not back_meanwhile:
            hosts.rails.mends(rails, fault)
        hosts.all_carry()
        print(f"    all carry after {time.monotonic() - begun:.2f} s, retries {hosts.near.ask('stats')['retries']}")


@shaped
def test_a_silent_nic_is_found_by_its_stall_and_avoided(make_hosts) -> None:
    hosts = make_hosts(bridged=True, mbit=MBIT)
    transfer = hosts.begin()
    transfer.reach(0.2)
    hosts.rails.breaks([2], "unplugged")
    transfer.completes()
    silent = hosts.paths()["eth2"]
    assert silent["failures"] > 0
    assert not silent["usable"]
    assert hosts.near.ask("stats")["retries"] > 0
    again = hosts.begin()
    again.completes()
    shares = again.shares()
    assert shares["eth2"] < MIB / 4, "the silent NIC is only probed"
    assert sum(shares.values()) > again.nbytes


@shaped
@pytest.mark.parametrize(("fault", "bridged"), [("near", False), ("unplugged", True)])
def test_a_partition_fails_in_time_and_heals(make_hosts, rng, fault: Fault, bridged) -> None:
    limits = LIMITS | {"base_deadline_s": 4.0, "min_rate_bytes_s": 1 << 30}
    hosts = make_hosts(bridged=bridged, mbit=MBIT, limits=limits)
    transfer = hosts.begin()
    transfer.reach(rng.uniform(0.05, 0.5))
    hosts.rails.breaks(range(4), fault)
    end = transfer.ends()
    print(end)
    assert {status for status, _, _ in end["outcomes"]} <= {"completed", "failed", "timeout"}
    assert {status for status, _, _ in end["outcomes"]} & {"failed", "timeout"}
    assert {reason for _, reason, _ in end["outcomes"]} <= {
        *("NONE", "STALLED", "DEADLINE", "CONNECT_FAILED", "CONNECTION_LOST", "NO_PATH")
    }
    assert end["moved_bytes"] < transfer.nbytes
    assert end["elapsed_s"] < limits["base_deadline_s"] + transfer.nbytes / limits["min_rate_bytes_s"] + WAIT_S / 2
    another = hosts.begin().ends()  # during the fault
    assert {status for status, _, _ in another["outcomes"]} <= {"failed", "timeout"}
    hosts.rails.mends(range(4), fault)
    hosts.begin().completes()
    hosts.all_carry()
    stats = hosts.near.ask("stats")
    assert stats["requests_now"] == 0


@shaped
def test_a_slow_nic_gets_less(make_hosts) -> None:
    hosts = make_hosts(mbit=2 * MBIT, limits=PATIENT)
    hosts.rails.shape(1, MBIT / 4)
    first = hosts.begin()
    first.completes()  # measures the rates
    assert first.shares()["eth1"] > 0

    moved: Counter[str] = Counter()
    for _ in range(5):  # summed, so that one disturbed transfer does not decide
        transfer = hosts.begin()
        transfer.completes()
        moved.update(transfer.shares())
    print(moved)
    assert moved.pop("eth1") < moved.total() / len(moved) / 2
    assert not hosts.paths()["eth1"]["failures"], "slow is not broken"


@shaped
def test_secondary_nics_carry_only_while_preferred_ones_are_down(make_hosts) -> None:
    hosts = make_hosts(bridged=True, mbit=MBIT, topology={"cpu:0": [["eth0", "eth1"], ["eth2", "eth3"]]})

    def carriers() -> set[str]:
        transfer = hosts.begin(12)
        transfer.completes()
        shares = transfer.shares()
        print(shares)
        few = MIB / 4  # probes and the like
        return {nic for nic, nbytes in shares.items() if nbytes > few}

    def carry(*expected: str) -> None:
        failed = False

        def exactly() -> bool:
            # Once the engine has counted a failure, as a busy machine's stall is one, its NIC needs time to return.
            nonlocal failed
            unused = {nic: {"usable": True, "failures": 0} for nic in NICS}
            before = unused | hosts.paths()
            found = carriers()
            after = unused | hosts.paths()
            failed |= any(
                not before[nic]["usable"] or after[nic]["failures"] > before[nic]["failures"] for nic in expected
            )
            assert failed or found == set(expected)
            return found == set(expected)

        wait_until(exactly, f"{' and '.join(expected)} carry")

    carry("eth0", "eth1")
    hosts.rails.breaks([0], "near")
    carry("eth1")
    transfer = hosts.begin()
    transfer.reach(0.3)
    hosts.rails.breaks([1], "far")
    transfer.completes()
    carry("eth2", "eth3")
    hosts.rails.mends([0], "near")
    hosts.rails.mends([1], "far")
    hosts.all_carry(["eth0", "eth1"])
    carry("eth0", "eth1")


@shaped
@pytest.mark.parametrize("kill", [False, True], ids=["frozen", "killed"])
def test_a_dead_host_is_not_tried_over_every_nic_for_ever(make_hosts, kill) -> None:
    hosts = make_hosts(mbit=MBIT, limits=LIMITS | {"base_deadline_s": 6.0})
    transfer = hosts.begin()
    transfer.reach(0.3)
    hosts.far.kill() if kill else hosts.far.freeze()
    end = transfer.ends()
    print(end)
    statuses = {status for status, _, _ in end["outcomes"]}
    assert statuses - {"completed"} == ({"failed"} if kill else {"timeout"})
    if not kill:
        hosts.far.thaw()
        hosts.begin().completes()
        hosts.all_carry()


def test_hosts_that_share_no_memory_fall_back_to_tcp(make_hosts) -> None:
    """A peer's Unix socket in another namespace is out of reach, although the descriptor looks like this host's."""
    hosts = make_hosts(transports=None)
    hosts.begin().completes()
    hosts.all_carry()
