from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
import pytest

from pinyon.cli import main
from pinyon.cli.failures import plainly
from pinyon.runtime.metrics import MetricsServer, new_registry

NO_CONNECTION = "failed to connect to all addresses; last error: "
REFUSED = NO_CONNECTION + "UNKNOWN: ipv4:127.0.0.1:7000: Failed to connect to remote host: Connection refused"
CLOSED = NO_CONNECTION + "UNAVAILABLE: ipv4:127.0.0.1:7000: Socket closed"
HTTP1 = NO_CONNECTION + "UNAVAILABLE: ipv4:127.0.0.1:7000: Failed parsing HTTP/2 (Trying to connect an http1.x server)"
NO_HEAD = NO_CONNECTION + "UNAVAILABLE: ipv4:127.0.0.1:7000: Failed parsing HTTP/2 (Expected SETTINGS frame, got 79)"
NO_ALPN = NO_CONNECTION + "UNKNOWN: ipv4:127.0.0.1:7000: Cannot check peer: missing selected ALPN property."
NOT_TLS = NO_CONNECTION + "UNKNOWN: ipv4:127.0.0.1:7000: Tls handshake failed: error:100000f7:WRONG_VERSION_NUMBER"
OTHER_NAME = NO_CONNECTION + "UNKNOWN: ipv4:127.0.0.1:7000: Custom verification check failed: Hostname Verification"


class Failed(grpc.RpcError):
    def __init__(self, code: str, details: str | None) -> None:
        self._code, self._details = grpc.StatusCode[code], details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


@pytest.mark.parametrize(
    ("role", "code", "details", "tls_dir", "said"),
    [
        ("conductor", "UNAVAILABLE", REFUSED, "", "no conductor answers at h:1 (is it running? ./dev up)"),
        ("controller", "UNAVAILABLE", REFUSED, "", "no controller answers at h:1 (is it running? ./dev up --regions"),
        ("conductor", "UNAVAILABLE", "errors resolving h:1: [...]", "", "h:1 is not known"),
        ("conductor", "UNAVAILABLE", CLOSED, "", "it speaks TLS, it seems; --tls-dir DIR"),
        ("conductor", "UNAVAILABLE", CLOSED, "d", "no conductor answers at h:1: UNAVAILABLE: ipv4:127.0.0.1:7000: So"),
        ("lb", "UNAVAILABLE", HTTP1, "", "h:1 is an HTTP port"),
        ("lb", "UNAVAILABLE", HTTP1, "", "the gRPC of the load balancer is another one (8001 by default)"),
        ("worker", "UNAVAILABLE", NO_HEAD, "", "h:1 is no gRPC port of pinyon: it may be one of metrics"),
        ("worker", "UNAVAILABLE", NOT_TLS, "d", "or it is a port of metrics"),
        ("lb", "UNAVAILABLE", NO_ALPN, "d", "h:1 is an HTTP port"),
        ("lb", "UNAVAILABLE", NOT_TLS, "d", "the load balancer at h:1 speaks without TLS: leave out --tls-dir"),
        ("kvstore", "UNAVAILABLE", OTHER_NAME, "d", "h:1 is not a store node of the cluster of d"),
        ("lb", "UNAVAILABLE", "Socket closed", "", "the connection to the load balancer at h:1 broke"),
        ("lb", "UNAVAILABLE", "No instance is available.", "", "No instance is available."),
        ("worker", "DEADLINE_EXCEEDED", "Deadline Exceeded", "", "the worker at h:1 did not answer in time"),
        ("conductor", "UNIMPLEMENTED", "Method not found!", "", "what answers at h:1 is no conductor"),
        ("lb", "UNAUTHENTICATED", "You didn't provide an API key", "", "(--api-key, or PINYON_API_KEY)"),
        ("lb", "UNAUTHENTICATED", "this needs a certificate", "d", "at its --admin-listen"),
        ("lb", "NOT_FOUND", "no model 'x'", "", "no model 'x'"),
        ("lb", "NOT_FOUND", "no\x1b]0;evil\x07 \x9b2Jmodel", "", "no\\x1b]0;evil\\x07 \\x9b2Jmodel"),
        ("lb", "INTERNAL", None, "", "the load balancer at h:1 gave no reason (INTERNAL)"),
    ],
)
def test_failure_says_who_where_and_what_helps(role, code, details, tls_dir, said):
    error = plainly(Failed(code, details), role, "h:1", tls_dir)
    assert said in error.message
    assert error.grpc_code == (code if code != "UNIMPLEMENTED" else "INTERNAL")
    assert not error.message.startswith(code)


GRPC = [
    ["admin", "worker"],
    ["instances", "--conductor"],
    ["explain", "chatcmpl-1", "--conductor"],
    ["generate", "x", "--lb"],
    ["regions", "--controller"],
    ["trace", "record", "OUT", "--lb"],
    ["top", "--once", "--controller"],
]
"""Commands that end with an address of gRPC, and ask nobody else."""
OTHERS = [["replay", "TRACE", "--lb"], *(["top", "--once", option] for option in ("--conductor", "--lb", "--metrics"))]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.1:x", "::1", "[::1]", ":7000"])
@pytest.mark.parametrize("asked", GRPC + OTHERS, ids=" ".join)
def test_address_without_a_port_is_named(asked, address, trace, tmp_path, capsys):
    places = {"TRACE": trace, "OUT": str(tmp_path / "out.jsonl")}
    assert main([*(places.get(each, each) for each in asked), address]) == 1
    assert f"pinyon: {address!r} is no HOST:PORT" in capsys.readouterr().err


@pytest.fixture
def metrics() -> Iterator[str]:
    server = MetricsServer("127.0.0.1:0", new_registry())
    yield server.address
    server.close()


@pytest.mark.parametrize("asked", GRPC, ids=" ".join)
def test_port_of_metrics_is_told(asked, metrics, tmp_path, capsys):
    assert main([*(str(tmp_path / "out.jsonl") if each == "OUT" else each for each in asked), metrics]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"pinyon: {metrics} is no gRPC port of pinyon: it may be one of metrics (7300 and more")
    assert "HTTP/2" not in said


def test_top_takes_a_url_without_a_port(capsys):
    assert main(["top", "--once", "--lb", "http://127.0.0.1", "--conductor", "127.0.0.1:1", "--timeout-s", "2"]) == 1
    assert "no HOST:PORT" not in capsys.readouterr().err


def test_a_first_line_that_is_no_trace_names_its_file(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("# pinyon\n")
    assert main(["simulate", str(path)]) == 1
    assert f"pinyon: {path} is no trace: its first line is neither JSON" in capsys.readouterr().err


def test_without_a_command_each_has_a_line_of_help(capsys):
    assert main([]) == 2
    told = capsys.readouterr().err
    for name in ("instances", "generate", "admin", "replay", "simulate-cache", "top", "transfer"):
        assert re.search(rf"^    {name}\s+\w+", told, re.MULTILINE), name
