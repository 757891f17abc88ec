"""The log line of a request that has ended: its content and its cost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from pinyon.frontdoor.access_log import AccessLog
from pinyon.frontdoor.head import Logged
from pinyon.runtime.logging import configure_logging


@pytest.fixture
def written(capsys) -> Iterator[Callable[[], list[str]]]:
    """The lines on stderr under configured logging, which the fixture restores afterwards."""
    root, pinyon = logging.getLogger(), logging.getLogger("pinyon")
    before = root.handlers[:], root.level, pinyon.level
    yield lambda: capsys.readouterr().err.splitlines()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    pinyon.setLevel(before[2])
    logging.captureWarnings(False)


def line(log: AccessLog, quiet: bool = False, **changes) -> None:
    seen = Logged(1.0, "abc")
    seen.unique = "1"
    for name, value in {"holder": "acme", **changes}.items():
        setattr(seen, name, value)
    log.answered("POST", "/v1/completions", 200, seen, quiet=quiet)


def test_one_json_object(written):
    configure_logging("lb", "lb-0", "info", "json")
    line(AccessLog(True, lambda: 1.25), broken="unavailable")
    (text,) = written()
    said = json.loads(text)
    del said["time"]
    assert said == {
        "level": "info", "service": "lb", "instance_id": "lb-0", "logger": "pinyon.lb.access", "message": "access",
        "method": "POST", "route": "/v1/completions", "status": 200, "request_id": "abc.1", "tenant": "acme",
        "ms": 250.0, "broken": "unavailable",
    }  # fmt: skip


def test_one_line_of_text_whatever_a_tenant_is_called(written):
    configure_logging("lb", "lb-0", "info", "text")
    line(AccessLog(True, lambda: 1.25), holder="two words\n12:00:00 info lb-0 access status=200")
    (text,) = written()
    assert 'tenant="two words\\n12:00:00' in text
    assert text.count(" status=200 ") == 1


@pytest.mark.parametrize(
    ("level", "enabled", "quiet", "lines"),
    [("info", True, False, 1), ("info", True, True, 0), ("debug", True, True, 1), ("warning", True, False, 0),
     ("info", False, False, 0), ("debug", False, True, 0)],
)  # fmt: skip
def test_when_it_is_written(written, level, enabled, quiet, lines):
    configure_logging("lb", "lb-0", level, "text")
    line(AccessLog(enabled, lambda: 1.25), quiet=quiet)
    assert len(written()) == lines
