"""The simulated Redis beside a real one: equal answers and equal data after the same scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from launch.redis_server import find_redis
from pinyon.store import metadata_scripts as scripts
from tests.vopr.mini_redis import MiniRedis

KEYS = ("record", "life", "blocks")
BLOCKS = [bytes([number]) * 16 for number in range(6)]


@pytest.fixture(scope="module")
def real() -> Iterator[redis.Redis]:
    server = find_redis()
    with redis.Redis.from_url(server.url) as client:
        yield client
    server.close()


def eval_of(script: str, keys: tuple[str, ...], *arguments: Any) -> tuple[Any, ...]:
    return ("EVAL", script, len(keys), *keys, *arguments)


def step(random: Random) -> tuple[Any, ...]:
    """Returns a command as the store sends it, or something that a stranger does to its keys."""
    boot, number = random.choice(["a" * 32, "b" * 32]), random.randrange(8)
    gone, come = (random.sample(BLOCKS, random.randrange(4)) for _ in range(2))
    pairs = [each for key in come for each in (key, b"%c%011x" % (random.choice(b"md"), random.randrange(1, 1 << 40)))]
    return random.choice(
        [
            eval_of(scripts.ANNOUNCE, KEYS, boot, '{"boot": "x"}', 60_000, random.randrange(2)),
            eval_of(scripts.WRITE, KEYS[1:], boot, number, random.randrange(2), b"".join(gone), *pairs),
            eval_of(scripts.WRITE, KEYS[1:], boot, number, 1, b"".join(gone), *pairs),
            eval_of(scripts.LOCATE, KEYS[2:], b"".join(random.sample(BLOCKS, random.randint(1, 6)))),
            eval_of(scripts.LEAVE, KEYS, boot),
            eval_of(scripts.FORGET, KEYS),
            ("DEL", random.choice(KEYS)),
            ("GET", "record"),
            ("SADD", "nodes", random.choice("xyz")),
            ("SREM", "nodes", random.choice("xyz")),
            random.choice([("SET", random.choice(KEYS), "foreign"), ("SADD", random.choice(KEYS), "foreign")]),
        ]
    )


def outcome(execute: Any, command: tuple[Any, ...]) -> Any:
    try:
        reply = execute(*command)
    except ResponseError as error:
        return "WRONGTYPE" if "WRONGTYPE" in str(error) else "error"
    return b"OK" if reply is True else reply


def data_of(execute: Any) -> list[Any]:
    """Returns the content of every key."""
    found: list[Any] = []
    for key in (*KEYS, "nodes"):
        kind = execute("TYPE", key)
        reads = {b"hash": ("HGETALL", key), b"set": ("SMEMBERS", key), b"string": ("GET", key)}
        value = execute(*reads[bytes(kind)]) if bytes(kind) in reads else None
        if isinstance(value, list) and kind == b"hash":
            value = dict(zip(value[::2], value[1::2], strict=True))
        found.append((bytes(kind), sorted(value) if isinstance(value, (set, list)) else value))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_it_answers_as_a_real_redis_does(real: redis.Redis, seed: int) -> None:
    random, ours = Random(seed), MiniRedis(time.monotonic)
    real.flushall()
    for _ in range(400):
        command = step(random)
        assert outcome(ours.execute, command) == outcome(real.execute_command, command), command
        assert data_of(ours.execute) == data_of(real.execute_command), command


def test_what_expires_is_gone() -> None:
    now_s = 0.0
    ours = MiniRedis(lambda: now_s)
    ours.execute("SET", "record", "x", "PX", 1500)
    now_s = 1.4
    assert ours.execute("GET", "record") == b"x"
    now_s = 1.5
    assert ours.execute("EXISTS", "record") == 0
