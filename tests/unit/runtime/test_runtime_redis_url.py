"""URLs of one Redis, of Sentinels and of a cluster."""

from __future__ import annotations

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.redis_url import CLUSTER, SENTINELS, RedisUrl, parse_redis_url

TWO = (("a", 1), ("b", 6379))


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("redis://h:1/2", RedisUrl("", False, (("h", 1),), "", 2)),
        ("rediss://h", RedisUrl("", True, (("h", 6379),))),
        ("redis://[::1]:7", RedisUrl("", False, (("::1", 7),))),
        ("redis://:p%40s@h:1?timeout=3", RedisUrl("", False, (("h", 1),), password="p@s")),
        ("unix:///tmp/redis.sock?db=0", RedisUrl("", False, ())),
        ("redis+sentinel://a:1,b/pool", RedisUrl(SENTINELS, False, TWO, "pool")),
        ("rediss+sentinel://me:x@a:1,b/pool/3", RedisUrl(SENTINELS, True, TWO, "pool", 3, "me", "x")),
        ("redis+cluster://a:1,b", RedisUrl(CLUSTER, False, TWO)),
        ("rediss+cluster://a:1,b/", RedisUrl(CLUSTER, True, TWO)),
    ],
)
def test_urls_that_are_known(url: str, parsed: RedisUrl) -> None:
    assert parse_redis_url(url) == parsed


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "http://h:1", "redis://a:1,b:2", "redis+sentinel://a:1", "redis+cluster://a:1/0",
     "redis+ring://a:1", "redis://h:99999", "redis://h:1/x", "unix+cluster://a"],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"redis\+sentinel") as caught:
        parse_redis_url(url)
    assert caught.value.field == "redis_url"
