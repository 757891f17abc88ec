"""A service's transfer engine: what its settings become, and what Prometheus sees of it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.runtime.transfer_engine import TransferSettings, register_transfer_metrics, start_transfer_engine
from pinyon.transfer import Opcode, TransferRequest


def settings(**values: str) -> TransferSettings:
    return TransferSettings(**values)  # type: ignore[arg-type]


def test_settings_become_an_engine(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("rosebud\n")
    given = settings(transfer_nics="lo", transfer_transports="tcp", transfer_secret_file=str(secret))
    with_secret, without = start_transfer_engine(given), start_transfer_engine(settings())
    try:
        segment = with_secret.descriptor()
        (nic,) = segment.nics
        assert (nic.name, nic.transport, nic.address) == ("lo", "tcp", "127.0.0.1")
        assert segment.topology is not None
        assert segment.topology.nics == ("lo",)
        remote = with_secret.register_local_memory(bytearray(100))
        local = without.register_local_memory(bytearray(100))
        request = TransferRequest(Opcode.READ, local.key, 0, segment, remote.key, 0, 100)
        assert without.transfer([request])[0].reason.name == "UNAUTHENTICATED"
    finally:
        with_secret.close()
        without.close()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"transfer_transports": "carrier-pigeon"}, "transfer_transports"),
        ({"transfer_nics": "no-such-nic"}, "transfer_nics"),
        ({"transfer_topology": '{"cpu:0": 1}'}, "transfer_topology"),
        ({"transfer_secret_file": "/nonexistent"}, "transfer_secret_file"),
        ({"transfer_tls_cert": "/nonexistent"}, "transfer_tls_cert"),
        ({"transfer_listen": "0.0.0.0:0"}, "transfer_advertise_host"),
    ],
)
def test_wrong_settings_name_the_field(values, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        start_transfer_engine(settings(**values))
    assert caught.value.field == field


def test_an_empty_secret_is_refused(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("\n")
    with pytest.raises(InvalidArgument, match="1 to"):
        start_transfer_engine(settings(transfer_secret_file=str(secret)))


def test_an_address_that_is_taken() -> None:
    first = start_transfer_engine(settings())
    try:
        port = first.descriptor().port
        with pytest.raises(Unavailable):
            start_transfer_engine(settings(transfer_listen=f"127.0.0.1:{port}"))
    finally:
        first.close()


def test_metrics_agree_with_what_was_moved() -> None:
    registry = CollectorRegistry(auto_describe=True)
    engine, server = start_transfer_engine(settings(transfer_transports="tcp")), start_transfer_engine(settings())
    try:
        register_transfer_metrics(registry, engine)
        local, remote = engine.register_local_memory(bytearray(5000)), server.register_local_memory(bytearray(5000))
        segment = server.descriptor()
        for _ in range(3):
            request = TransferRequest(Opcode.WRITE, local.key, 0, segment, remote.key, 0, 5000)
            assert engine.transfer([request])[0].ok
        refused = TransferRequest(Opcode.READ, local.key, 0, segment, bytes(16), 0, 10)
        assert not engine.transfer([refused])[0].ok
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        }
    finally:
        engine.close()
        server.close()
    path = (("local_nic", ""), ("remote_nic", ""), ("transport", "tcp"))
    assert samples["pinyon_transfer_written_bytes_total",] == 15000
    assert samples["pinyon_transfer_requests_total", ("status", "completed")] == 3
    assert samples["pinyon_transfer_failures_total", ("reason", "unknown_region")] == 1
    assert samples["pinyon_transfer_request_seconds_count",] == 4
    assert samples["pinyon_transfer_path_bytes_total", *path] >= 15000
    assert samples["pinyon_transfer_path_seconds_bucket", ("le", "+Inf"), *path] == 4
    assert samples["pinyon_transfer_avoided_paths", *path] == 0
    assert samples["pinyon_transfer_requests_in_flight",] == 0
