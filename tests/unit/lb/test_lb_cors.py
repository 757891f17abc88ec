from __future__ import annotations

import pytest
from pydantic import ValidationError

from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.cors import Cors
from services.lb.settings import LbSettings


@pytest.mark.parametrize(
    "origins",
    ["a.example", "https://", "https://a.example/", "*,https://a.example", "https://a b", "https://a\r\nx: y", "null",
     ",".join(f"https://a{number}" for number in range(101))],
)  # fmt: skip
def test_what_is_no_origin_is_refused_at_the_start(origins):
    with pytest.raises(InvalidArgument):
        Cors(origins)
    with pytest.raises(ValidationError, match="origin"):
        LbSettings(cors_origins=origins)


@pytest.mark.parametrize("origins", ["", " , "])
def test_nobody_by_default(origins):
    assert not Cors(origins)
    assert not Cors(LbSettings().cors_origins)


def test_an_origin_is_matched_whole():
    cors = Cors("https://a.example:8443")
    for origin in (b"https://a.example", b"https://a.example:84430", b"http://a.example:8443", b"null", b"*"):
        assert b"allow-origin" not in cors.fields([(b"origin", origin)])
    assert b"allow-origin: https://a.example:8443\r\n" in cors.fields([(b"origin", b"https://A.example:8443")])
