"""``pinyon kv`` against running store nodes: what it shows and changes, and what it says of faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pinyon.cli import main
from pinyon.core.request import RequestClass
from pinyon.store.records import NodeRecord
from pinyon.store.writer import PutOutcome
from tests.integration.kvstore_parts import OBJECT, Client, Node, acquire, key, release, running_node, start
from tests.ports import kept_port
from tests.waiting import WAIT_S, eventually

CAPACITY = (1 << 20) // OBJECT
ANNA = RequestClass("file", 3, "s", "u", -1, 1.5, "anna", ("eu-west",))


class Kv:
    """The command, with the Redis of this test."""

    def __init__(self, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.redis_url, self._capsys = redis_url, capsys

    async def run(self, *words: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, ["kv", words[0], "--redis-url", self.redis_url, *words[1:]])
        said = self._capsys.readouterr()
        return status, said.out, said.err

    async def values(self, *words: str, status: int = 0) -> Any:
        """Returns the JSON object that the command prints."""
        found, out, err = await self.run(*words, "--json")
        assert (found, bool(err)) == (status, bool(status)), err
        return json.loads(out)


@pytest.fixture
def kv(redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kv:
    monkeypatch.setenv("COLUMNS", "200")
    return Kv(redis_url, capsys)


@pytest.fixture
async def nodes(redis_url: str) -> AsyncIterator[list[Node]]:
    async with running_node(redis_url, "kv-0") as first, running_node(redis_url, "kv-1") as second:
        yield [first, second]


def words(*numbers: int) -> list[str]:
    return [key(number).hex() for number in numbers]


async def test_ls_shows_the_coldest_or_largest_first(kv: Kv, node: Node, client: Client) -> None:
    await client.stored([1])
    result = await client.store.put(client.fill([2]), OBJECT, WAIT_S, request_class=ANNA)
    half = client.kv.pieces(0)[0]._replace(length=OBJECT // 2)
    result += await client.store.put([(key(3), [half])], OBJECT // 2, WAIT_S)
    assert result == (PutOutcome.STORED,) * 2
    lease = await acquire(node, 1)
    values = await kv.values("ls")
    idle = [each.pop("idle_s") for each in values["objects"]]
    assert idle == sorted(idle, reverse=True)
    common = {"tier": "memory", "node": "kv-0", "pinned": False}
    assert values == {
        "objects": [
            {"key": words(2)[0], "size_bytes": OBJECT, "tenant": "anna", "category": "file/3", "leases": 0, **common},
            {"key": words(3)[0], "size_bytes": OBJECT // 2, "tenant": "", "category": "", "leases": 0, **common},
            {"key": words(1)[0], "size_bytes": OBJECT, "tenant": "", "category": "", "leases": 1, **common},
        ],
        "sum": {"objects": 3, "size_bytes": 2 * OBJECT + OBJECT // 2},
        "errors": {},
    }
    large = await kv.values("ls", "--sort", "large", "--limit", "2")
    assert {each["key"] for each in large["objects"]} == set(words(1, 2))
    assert large["sum"]["objects"] == 3
    of_anna = await kv.values("ls", "--tenant", "anna")
    assert [each["key"] for each in of_anna["objects"]] == words(2)
    status, out, _ = await kv.run("ls", "--limit", "1")
    lines = out.splitlines()
    assert status == 0
    assert lines[0].split() == ["key", "size", "tier", "node", "tenant", "category", "leases", "pinned", "idle", "s"]
    assert lines[1].split()[:7] == [words(2)[0], "64", "KiB", "memory", "kv-0", "anna", "file/3"]
    assert lines[2] == "1 of 3 objects, 160 KiB in all"
    await release(node, lease)


async def test_ls_pages_through_many_objects(kv: Kv, redis_url: str, client: Client) -> None:
    count = 1500
    async with running_node(redis_url, pool_mib=1):
        objects = [(key(number), [client.kv.pieces(0)[0]._replace(length=64)]) for number in range(count)]
        assert set(await client.store.put(objects, 64, WAIT_S)) == {PutOutcome.STORED}
        values = await kv.values("ls", "--limit", str(count - 1))
        found = [each["key"] for each in values["objects"]]
        assert len(found) == len(set(found)) == count - 1
        assert values["sum"] == {"objects": count, "size_bytes": 64 * count}


async def test_stat_has_a_line_per_node_and_a_sum(kv: Kv, nodes: list[Node], client: Client) -> None:
    await client.stored([1, 2, 3])
    await client.until_listed([1, 2, 3])
    await client.get([1, 2, 3])
    values = await kv.values("stat")
    total = values["sum"]
    assert [each["node"] for each in values["nodes"]] == ["kv-0", "kv-1"]
    assert all(each["answers"] and each["capacity_bytes"] == 1 << 20 for each in values["nodes"])
    assert total["free_bytes"] == 2 * (1 << 20) - 3 * OBJECT
    assert (total["objects"], total["used_bytes"], total["hits"]) == (3, 3 * OBJECT, 3)
    status, out, _ = await kv.run("stat")
    assert status == 0
    assert out.splitlines()[-1].split()[:7] == ["sum", "2", "MiB", "192", "KiB", "1.812", "MiB"]


async def test_stat_and_ls_show_objects_on_the_disk(kv: Kv, redis_url: str, client: Client, tmp_path: Path) -> None:
    async with running_node(redis_url, disk_dir=str(tmp_path), disk_mib=16, drain_s=WAIT_S) as node:
        await client.stored(list(range(CAPACITY)))
        log = node.node.table.disk
        assert log is not None
        await eventually(lambda: len(log) == CAPACITY, "all objects on the disk")
        await client.stored([100, 101])
        await eventually(lambda: len(log) == CAPACITY + 2, "the new objects on the disk")
        assert (await kv.values("stat"))["sum"]["disk_objects"] == CAPACITY + 2
        values = await kv.values("ls")
        on_disk = [each for each in values["objects"] if each["tier"] == "disk"]
        assert on_disk
        assert {each["idle_s"] for each in on_disk} == {None}
        assert values["objects"][: len(on_disk)] == on_disk, "they are the coldest"
        assert values["sum"]["objects"] == CAPACITY + 2
        found = (await kv.values("pin", on_disk[0]["key"]))["pinned"]
        assert found == [{"key": on_disk[0]["key"], "node": "kv-0"}], "it was read into memory first"
        assert node.node.table.in_memory(bytes.fromhex(on_disk[0]["key"]))
        evicted = await kv.values("evict", "--all")
        assert (evicted["sum"]["evicted"], evicted["sum"]["kept"]) == (CAPACITY + 1, 1)


async def test_locate_says_where_redis_and_a_node_differ(kv: Kv, nodes: list[Node], client: Client) -> None:
    await client.stored([1])
    await client.until_listed([1])
    (copy,) = (await kv.values("locate", *words(1)))["copies"]
    (holder,) = [each for each in nodes if key(1) in each.node.table]
    right = {"key": words(1)[0], "node": holder.node.node_id, "tier": "memory", "size_bytes": OBJECT}
    assert copy == {**right, "in_redis": True, "node_says": "the same"}
    holder.node.table.remove([key(1)])  # Redis is not told
    (copy,) = (await kv.values("locate", *words(1)))["copies"]
    assert copy == {**right, "in_redis": True, "node_says": "does not have it"}
    status, out, err = await kv.run("locate", *words(1, 2))
    assert status == 1
    assert words(1)[0] in out
    assert err == f"pinyon: no node has {words(2)[0]}\n"


async def test_pinned_objects_stay_and_puts_say_why_there_is_no_room(kv: Kv, redis_url: str, client: Client) -> None:
    async with running_node(redis_url, pinned_share=0.25) as node:
        few, rest = list(range(CAPACITY // 4)), list(range(CAPACITY // 4, CAPACITY))
        await client.stored(few + rest)
        assert len((await kv.values("pin", *words(*few)))["pinned"]) == len(few)
        status, _, err = await kv.run("pin", *words(rest[0]))
        assert status == 1
        assert err == (
            f"pinyon: kv-0: these take {OBJECT} bytes that are not pinned yet; {len(few) * OBJECT} are, and at most "
            f"{len(few) * OBJECT} may be\n"
        )
        await client.stored([*range(100, 100 + 2 * CAPACITY // 3)])
        assert node.node.table.exists([key(each) for each in few]) == [True] * len(few)
        assert (await kv.values("stat"))["sum"]["pinned_objects"] == len(few)
        lease = await acquire(node, *rest, *range(100, 100 + CAPACITY))
        assert set(await client.put([200])) == {PutOutcome.NO_SPACE}
        by = f"{1 << 20} are leased or pinned ({len(few) * OBJECT} pinned)"
        assert by in (await start(node, 200)).no_space
        await release(node, lease)
        assert len((await kv.values("unpin", *words(*few)))["unpinned"]) == len(few)
        status, _, err = await kv.run("unpin", *words(0))
        assert (status, err) == (1, f"pinyon: {words(0)[0]} was not pinned\n")
        await client.stored([300])


async def test_a_pin_ends_by_its_time(kv: Kv, node: Node, client: Client) -> None:
    await client.stored([1])
    status, out, _ = await kv.run("pin", *words(1), "--for", "0.05")
    assert (status, out) == (0, "pinned 1 of 1 keys (copies: 1)\n")
    await eventually(lambda: not node.node.table.pinned, "the end of the pin")
    assert node.nothing_is_left()


async def test_evict_drops_what_is_named(kv: Kv, nodes: list[Node], client: Client) -> None:
    await client.stored([1, 2, 3])
    (lender,) = [each for each in nodes if key(1) in each.node.table]
    lease = await acquire(lender, 1)
    status, out, _ = await kv.run("evict", *words(1, 2))
    assert (status, out) == (0, "evicted 2 objects, 128 KiB; still being read: 1\n")
    await client.until_listed([1, 2], 0)
    assert await client.get([1, 2, 3]) == [False, False, True]
    assert lender.node.table.leased_objects == 1
    await release(lender, lease)
    status, _, err = await kv.run("evict", *words(1))
    assert (status, err) == (1, "pinyon: no node has any of these keys\n")
    result = await client.store.put(client.fill([4, 5]), OBJECT, WAIT_S, request_class=ANNA)
    assert result == (PutOutcome.STORED,) * 2
    await kv.values("pin", *words(5))
    evicted = (await kv.values("evict", "--tenant", "anna"))["sum"]
    assert evicted == {"evicted": 1, "evicted_bytes": OBJECT, "still_read": 0, "kept": 1}
    assert (await kv.values("evict", *words(5)))["sum"]["evicted"] == 1, "named keys go although they are pinned"
    assert (await kv.values("evict", "--all"))["sum"]["evicted"] == 1
    await eventually(lambda: all(each.nothing_is_left() for each in nodes), "an idle store")
    assert not any(each.node.table.pinned_bytes for each in nodes)


async def test_replicas_makes_and_removes_copies(kv: Kv, nodes: list[Node], client: Client) -> None:
    await client.stored([1, 2])
    await client.until_listed([1, 2])
    status, out, _ = await kv.run("replicas", *words(1, 2), "--copies", "2")
    assert (status, out) == (0, "2 of 2 keys have copies; made 2 copies, removed 0\n")
    await client.until_listed([1, 2], 2)
    values = await kv.values("replicas", *words(1), "--copies", "1", "--node", "kv-0")
    assert values["sum"] == {"made": 0, "missing": 0, "removed": 1}, "the copies of all nodes count"
    await client.until_listed([1], 1)
    status, _, err = await kv.run("replicas", *words(9))
    assert (status, err) == (1, f"pinyon: no node has {words(9)[0]}\n")
    status, _, err = await kv.run("replicas", *words(1), "--copies", "0")
    assert (status, err) == (1, "pinyon: a block has 1 to 8 copies\n")


async def test_drain_moves_what_a_node_has(kv: Kv, nodes: list[Node], client: Client) -> None:
    await client.stored([1, 2, 3])
    await client.until_listed([1, 2, 3])
    (leaving,) = [each for each in nodes if key(1) in each.node.table]
    (other,) = [each for each in nodes if each is not leaving]
    status, _, err = await kv.run("drain")
    assert (status, err) == (1, "pinyon: --node names the node that is to leave\n")
    status, out, _ = await kv.run("drain", "--node", leaving.node.node_id)
    assert (status, out) == (0, f"{leaving.node.node_id} may be stopped: copied 3 of 3 objects, 192 KiB; lost: 0\n")
    assert all(key(number) in other.node.table for number in (1, 2, 3))
    status, _, err = await kv.run("drain", "--node", other.node.node_id)
    assert (status, err) == (1, f"pinyon: {other.node.node_id}: there is no other store node to copy to\n")


async def test_only_the_named_node_is_asked(kv: Kv, nodes: list[Node], client: Client) -> None:
    await client.stored([1])
    (other,) = [each for each in nodes if key(1) not in each.node.table]
    found = await kv.values("ls", "--node", other.node.node_id)
    assert found["objects"] == []
    status, out, err = await kv.run("ls", "--node", "kv-9")
    assert (status, out) == (1, "")
    assert err == "pinyon: no store node kv-9 is up; there are kv-0, kv-1\n"


async def test_a_node_that_does_not_answer_is_shown(kv: Kv, node: Node, client: Client) -> None:
    with kept_port() as port:
        await shows_a_lost_node(kv, client, f"127.0.0.1:{port}")


async def shows_a_lost_node(kv: Kv, client: Client, address: str) -> None:
    lost = NodeRecord("kv-lost", "a" * 32, address, 1 << 20)
    await client.store.metadata.register(lost, 60.0)
    status, out, err = await kv.run("stat")
    assert status == 1
    assert [line.split()[0] for line in out.splitlines()] == ["node", "kv-0", "kv-lost", "sum"]
    assert out.splitlines()[2].split() == ["kv-lost", "no", *"–" * 11]
    assert err.startswith(f"pinyon: kv-lost: no store node answers at {lost.address}")
    values = await kv.values("stat", status=1)
    assert values["nodes"][1] == {"node": "kv-lost", "address": lost.address, "answers": False}
    assert list(values["errors"]) == ["kv-lost"]
    await client.stored([1])
    assert len((await kv.values("ls", status=1))["objects"]) == 1
    await client.store.metadata.leave(lost)


async def test_wrong_words_get_one_clear_line(kv: Kv, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = await kv.run("stat")
    assert status == 1
    assert err.startswith("pinyon: no store node is up, says Redis at 127.0.0.1:")
    with kept_port() as port:
        kv.redis_url = f"redis://user:secret@127.0.0.1:{port}/0"
        status, _, err = await kv.run("stat")
    assert status == 1
    assert err.startswith("pinyon: no Redis answers at 127.0.0.1:")
    assert "secret" not in err
    kv.redis_url = "http://x"
    status, _, err = await kv.run("stat")
    assert (status, err.count("\n")) == (1, 1)
    assert "not a Redis URL" in err
    kv.redis_url = redis_url
    async with running_node(redis_url):
        for given in ("xyz", "ab" * 15, "0x" + "ab" * 15):
            status, _, err = await kv.run("pin", given)
            assert (status, err) == (1, f"pinyon: {given!r} is no key: a key is 32 hex digits\n")
        status, _, err = await kv.run("ls", "--limit", "0")
        assert (status, err) == (1, "pinyon: --limit is 1 to 100000\n")
        for words_ in ([], [key(1).hex(), "--all"]):
            status, _, err = await kv.run("evict", *words_)
            assert (status, err) == (1, "pinyon: name keys, or give --all, or --tenant\n")
    kv.redis_url = ""
    status, _, err = await kv.run("stat")
    assert (status, err) == (1, "pinyon: --redis-url (or PINYON_REDIS_URL) names the Redis of the store nodes\n")
    for wrong in (["locate"], ["frob"]):
        with pytest.raises(SystemExit, match="2"):
            await kv.run(*wrong)
    capsys.readouterr()
