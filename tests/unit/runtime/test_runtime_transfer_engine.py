"""A service's transfer engine: the effect of its settings, and its metrics."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.runtime import transfer_engine
from pinyon.runtime.security import load_security
from pinyon.runtime.transfer_engine import TransferSettings, register_transfer_metrics, start_transfer_engine
from pinyon.transfer import Nic, Opcode, Reason, TransferEngine, TransferLimits, TransferRequest, TransferResult
from pinyon.transfer.transports.shm.cma import shm_available
from tests.tls_files import TestAuthority


@pytest.fixture(autouse=True)
def limits_that_no_test_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = partial(TransferLimits, stall_s=120.0, connect_s=120.0, base_deadline_s=120.0)
    monkeypatch.setattr(transfer_engine, "TransferLimits", patient)


def settings(**values: str) -> TransferSettings:
    return TransferSettings(**values)  # type: ignore[arg-type]


def test_settings_become_an_engine(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("rosebud\n")
    given = settings(
        transfer_nics="lo", transfer_transports="tcp", cluster_secret_file=str(secret), transfer_spin_us="0"
    )
    with_secret, without = start_transfer_engine(given, load_security(given)), start_transfer_engine(settings())
    try:
        assert (with_secret.limits.spin_s, without.limits.spin_s) == (0.0, 100e-6)
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
        ({"transfer_listen": "0.0.0.0:0", "allow_insecure": True}, "transfer_advertise_host"),
    ],
)
def test_wrong_settings_name_the_field(values, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        start_transfer_engine(settings(**values))
    assert caught.value.field == field


def moved(one: TransferEngine, other: TransferEngine) -> TransferResult:
    local, remote = one.register_local_memory(bytearray(100)), other.register_local_memory(bytearray(100))
    return one.transfer([TransferRequest(Opcode.READ, local.key, 0, other.descriptor(), remote.key, 0, 100)])[0]


def test_with_tls_only_workers_and_stores_move_bytes_without_shm(tmp_path) -> None:
    authority = TestAuthority(tmp_path / "certs")

    def start(role: str, **values: str) -> TransferEngine:
        given = settings(tls_dir=str(authority.folder(role, "a")), **values)
        return start_transfer_engine(given, load_security(given))

    with contextlib.ExitStack() as stack:
        worker, store, lb = (
            stack.enter_context(contextlib.closing(start(role))) for role in ("worker", "kvstore", "lb")
        )
        assert worker.descriptor().shm == ""
        assert moved(worker, store).ok
        assert {path.transport for path, _ in ((one.path, one) for one in worker.stats().paths)} == {"tcp"}
        assert moved(lb, store).reason is Reason.UNAUTHENTICATED
        assert moved(worker, lb).reason is Reason.UNAUTHENTICATED
        plain = stack.enter_context(contextlib.closing(start_transfer_engine(settings())))
        assert moved(plain, store).reason is Reason.UNAUTHENTICATED
        if shm_available() is None:
            assert stack.enter_context(contextlib.closing(start("worker", transfer_allow_shm="true"))).descriptor().shm
            assert plain.descriptor().shm
    with pytest.raises(InvalidArgument, match="--transfer-allow-shm") as caught:
        start("worker", transfer_transports="shm,tcp")
    assert caught.value.field == "transfer_transports"


def test_links_made_after_a_renewal_show_the_new_certificate(tmp_path) -> None:
    """Both sides change authority: later links need the new one."""
    old, new = TestAuthority(tmp_path / "old"), TestAuthority(tmp_path / "new")
    folders = {role: old.folder(role, "a") for role in ("worker", "kvstore")}
    given = {role: settings(tls_dir=str(folder)) for role, folder in folders.items()}
    security = {role: load_security(each) for role, each in given.items()}
    store = start_transfer_engine(given["kvstore"], security["kvstore"])
    worker = start_transfer_engine(given["worker"], security["worker"])
    try:
        assert moved(worker, store).ok
        for role, folder in folders.items():
            for path in new.folder(role, "a").iterdir():
                if path.name != "cluster.secret":
                    (folder / path.name).write_bytes(path.read_bytes())
            security[role].renew()
        assert moved(worker, store).ok  # the existing link is used
        late = settings(tls_dir=str(old.folder("worker", "b")))
        stranger = start_transfer_engine(late, load_security(late))
        newcomer = settings(tls_dir=str(folders["worker"]))
        member = start_transfer_engine(newcomer, load_security(newcomer))
        try:
            assert moved(stranger, store).reason is Reason.UNAUTHENTICATED
            assert moved(member, store).ok
        finally:
            stranger.close()
            member.close()
    finally:
        worker.close()
        store.close()


def test_nics_that_others_reach_need_tls(monkeypatch) -> None:
    monkeypatch.setattr(
        "pinyon.runtime.transfer_engine.tcp_nics", lambda *_, **__: (Nic("eth9", "tcp", "192.0.2.7", 0),)
    )
    with pytest.raises(InvalidArgument, match="--allow-insecure") as caught:
        start_transfer_engine(settings(transfer_nics="eth9"))
    assert caught.value.field == "transfer_nics"


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
