"""A line written without ``logging`` is the line that ``logging`` would have written."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest

from pinyon.runtime.logging import SELDOM_S, configure_logging, get_logger, log_line, show_logs

FACTS = {
    "method": "POST", "status": 200, "request_id": "r 1", "ms": 1.5, "empty": "", "line": "a\nb", "quoted": 'x"y',
    "stream": False, "none": None, "tree": "\U0001f332", "list": ["a", 1],
}  # fmt: skip


@pytest.fixture
def stderr():
    root, pinyon = logging.getLogger(), logging.getLogger("pinyon")
    before = root.handlers[:], root.level, pinyon.level
    options = logging.logThreads, logging.logProcesses, logging.logMultiprocessing
    stream = io.StringIO()
    yield stream
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    pinyon.setLevel(own_level)
    logging.logThreads, logging.logProcesses, logging.logMultiprocessing = options
    logging.captureWarnings(False)


def configure(stderr, form="text", level="info"):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        configure_logging("lb", "lb-0", level, form)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING])
def test_it_is_the_same_line(stderr, monkeypatch, form, level):
    configure(stderr, form, "debug")
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.25)
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000_250_000_000, raising=False)
    log = get_logger("lb.access")
    log_line(log, level, "access", FACTS)
    log.log(level, "access", extra=FACTS)
    quick, usual = stderr.getvalue().splitlines()
    assert quick == usual
    assert "request_id" in quick


def test_who_else_listens_hears_it_too(stderr, caplog):
    """The line is an ordinary record if there is another handler, of a test or an embedding program."""
    configure(stderr)
    logging.getLogger().addHandler(caplog.handler)
    log_line(get_logger("lb.access"), logging.INFO, "access", {"status": 404})
    assert [(each.getMessage(), vars(each)["status"]) for each in caplog.records] == [("access", 404)]
    assert stderr.getvalue().count("status=404") == 1


def test_a_stream_that_takes_nothing_harms_nobody(stderr, monkeypatch):
    configure(stderr)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    stderr.close()
    log_line(get_logger("lb.access"), logging.INFO, "access", {"status": 200})


def test_within_an_engine_a_text_is_shown_now_and_then(stderr, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(log := logging.getLogger("pinyon"), "handlers", [])
    monkeypatch.setattr(log, "propagate", log.propagate)
    show_logs("info")
    show_logs("info")
    now_s = 1_800_000_000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(now_s * 1e9))
    for number in range(3):
        get_logger("store").info("node %d is away", number)
    get_logger("store").info("another text")
    now_s += SELDOM_S
    get_logger("store").info("node %d is away", 7)
    shown = [line.rpartition(": ")[2] for line in stderr.getvalue().splitlines()]
    assert shown == ["node 0 is away", "another text", "node 7 is away"]
