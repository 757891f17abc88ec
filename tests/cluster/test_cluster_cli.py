"""The ``pinyon`` command against a running suite."""

from __future__ import annotations

import pytest

from pinyon.cli import main


@pytest.fixture(autouse=True)
def _as_admin(cluster, monkeypatch):
    monkeypatch.setenv("PINYON_TLS_DIR", str(cluster.access.admin or ""))


def test_instances(cluster, capsys):
    assert main(["instances", "--conductor", cluster.conductor]) == 0
    shown = capsys.readouterr().out
    assert "serving pinyon-tiny" in shown
    lines = [line.split() for line in shown.splitlines()]
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0"):
        assert any(line and line[0] == name for line in lines), shown
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_generate(cluster, capsys):
    lb = cluster.services["lb-0"].endpoints["grpc"]
    assert main(["generate", "The jay", "--lb", lb, "--max-tokens", "6"]) == 0
    first = capsys.readouterr()
    assert main(["generate", "The jay", "--lb", lb, "--max-tokens", "6"]) == 0
    assert capsys.readouterr().out == first.out
    assert "7 prompt tokens" in first.err
    assert "6 generated" in first.err


def test_top_shows_a_suite_that_has_no_controller(cluster, capsys):
    lb = cluster.services["lb-0"].endpoints["grpc"]
    assert main(["generate", "The wren sings", "--lb", lb, "--max-tokens", "6"]) == 0
    capsys.readouterr()
    asked = ["top", "--once", "--every-s", "0.1", "--conductor", cluster.conductor, "--lb", cluster.http]
    assert main(asked) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:5] == ["serving", "pinyon-tiny;", "4", "of", "4"]
    rates, times = [line[2:] for line in lines if line[:2] == ["since", "start"]]
    assert rates[-1].endswith("%")
    assert "-" not in times, "there are percentiles of TTFT and TBT"
    assert {"prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0"} <= {line[0] for line in lines if line}


def test_top_fails_once_where_one_does_not_answer(cluster, capsys):
    for conductor, lb, missing, there in (
        (cluster.conductor, "127.0.0.1:1", "no metrics at", "instances take requests"),
        ("127.0.0.1:1", cluster.http, "no conductor answers at 127.0.0.1:1", "since start"),
    ):
        assert main(["top", "--once", "--every-s", "0.1", "--conductor", conductor, "--lb", lb]) == 1
        shown = capsys.readouterr().out
        assert missing in shown
        assert there in shown, "it shows the service that answers"


def test_admin_talks_to_the_role_that_is_named(cluster, capsys):
    roles = {"conductor": "conductor", "lb": "lb-0", "worker": "decode-0", "kvstore": "kvstore-0"}
    found = {role: cluster.services[name].endpoints for role, name in roles.items()}
    addresses = {role: each.get("admin", each["grpc"]) for role, each in found.items()}
    for role, address in addresses.items():
        assert main(["admin", role, address, "--timeout-s", "20"]) == 0
        other = "worker" if role != "worker" else "lb"
        assert main(["admin", other, address, "--timeout-s", "20"]) == 1
        assert f"pinyon: what answers at {address} " in capsys.readouterr().err


def test_refusals_name_the_reason(cluster, capsys):
    lb = cluster.services["lb-0"].endpoints["grpc"]
    assert main(["generate", "x", "--lb", lb, "--model", "nobody"]) == 1
    assert "pinyon: " in (said := capsys.readouterr().err)
    assert "nobody" in said
    assert main(["generate", "x", "--lb", lb, "--temperature", "9"]) == 1
    assert "temperature" in capsys.readouterr().err
