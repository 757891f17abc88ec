"""The Prometheus endpoint: plain on loopback; elsewhere with TLS, for holders of a certificate of the cluster."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from pinyon.runtime import pages
from pinyon.runtime.metrics import MetricsServer, new_registry, show_certificate, show_policies
from pinyon.runtime.pages import CONNECTIONS_MAX
from pinyon.runtime.security import Security
from tests.tls_files import TestAuthority, tls_of


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "certs")


@pytest.fixture
def secured(authority: TestAuthority) -> Iterator[tuple[MetricsServer, Security]]:
    security = Security(tls_of(authority.folder("lb", "lb-0")))
    server = MetricsServer("0.0.0.0:0", new_registry(), security)
    yield server, security
    server.close()


def port(server: MetricsServer) -> int:
    return int(server.address.rpartition(":")[2])


def scrape(server: MetricsServer, folder: Path | None, ca: Path) -> tuple[int, int]:
    """Returns the HTTP status, and the serial number of the certificate that the server showed."""
    context = ssl.create_default_context(cafile=str(ca))
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port(server), timeout=30, context=context)
    try:
        connection.connect()
        shown = connection.sock.getpeercert(binary_form=True)
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        reply.read()
    finally:
        connection.close()
    return reply.status, x509.load_der_x509_certificate(shown).serial_number


def test_on_loopback_it_is_plain(authority: TestAuthority) -> None:
    registry = new_registry()
    show_certificate(registry, lambda: 12345.0)
    change = show_policies(registry, "lb", routing="least_loaded")
    server = MetricsServer("127.0.0.1:0", registry, Security(tls_of(authority.folder("lb", "lb-0"))))
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        assert "pinyon_certificate_not_after_seconds 12345.0" in text
        assert 'pinyon_lb_policies_info{routing="least_loaded"} 1.0' in text
        change("routing", "round_robin")
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as reply:
            assert 'pinyon_lb_policies_info{routing="round_robin"} 1.0' in reply.read().decode()
    finally:
        server.close()


def test_elsewhere_it_wants_a_certificate_and_shows_the_newest(
    secured: tuple[MetricsServer, Security], authority: TestAuthority, tmp_path: Path
) -> None:
    server, security = secured
    assert security.tls is not None
    ca, admin = security.tls.ca, authority.folder("admin", "prometheus")
    status, first = scrape(server, admin, ca)
    assert status == 200
    for stranger in (None, TestAuthority(tmp_path / "other").folder("admin", "prometheus")):
        with pytest.raises((OSError, http.client.HTTPException)):
            scrape(server, stranger, ca)
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(f"http://127.0.0.1:{port(server)}/metrics", timeout=30)
    authority.folder("lb", "lb-0")
    security.renew()
    status, second = scrape(server, admin, ca)
    assert status == 200
    assert second != first


def test_connections_that_say_nothing_are_few(
    secured: tuple[MetricsServer, Security], authority: TestAuthority
) -> None:
    """The server closes a connection beyond the limit at once; when the others have gone, there is room again."""
    server, security = secured
    assert security.tls is not None
    silent = [socket.create_connection(("127.0.0.1", port(server)), timeout=30) for _ in range(CONNECTIONS_MAX)]
    try:
        with socket.create_connection(("127.0.0.1", port(server)), timeout=30) as one_more:
            assert one_more.recv(1) == b""
    finally:
        for each in silent:
            each.close()
    admin = authority.folder("admin", "a")
    deadline = time.monotonic() + 60
    while True:
        try:
            assert scrape(server, admin, security.tls.ca)[0] == 200
            return
        except OSError:  # the threads of closed connections have not ended yet, and have no event
            assert time.monotonic() < deadline, "nobody is let in any more"


def test_another_authority_takes_over_and_the_old_is_locked_out(
    secured: tuple[MetricsServer, Security], authority: TestAuthority, tmp_path: Path
) -> None:
    """The server trusts both authorities for a while, then only the new one, as docs/use/security.md describes."""
    server, security = secured
    assert security.tls is not None
    newer = TestAuthority(tmp_path / "newer")
    old_admin, new_admin = authority.folder("admin", "a"), newer.folder("admin", "a")
    own, new_own = security.tls.certificate.parent, newer.folder("lb", "lb-0")
    both = (own / "ca.crt").read_bytes() + (new_own / "ca.crt").read_bytes()
    trusted = tmp_path / "both.crt"
    trusted.write_bytes(both)
    assert scrape(server, old_admin, trusted)[0] == 200
    with pytest.raises(OSError, match=r"."):
        scrape(server, new_admin, trusted)

    (own / "ca.crt").write_bytes(both)
    security.renew()
    assert scrape(server, old_admin, trusted)[0] == 200
    assert scrape(server, new_admin, trusted)[0] == 200

    for name in ("ca.crt", "tls.key", "tls.crt"):
        (own / name).write_bytes((new_own / name).read_bytes())
    security.renew()
    assert scrape(server, new_admin, trusted)[0] == 200
    with pytest.raises(OSError, match=r"."):
        scrape(server, old_admin, trusted)


def test_who_drips_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gains no time by a byte now and then."""
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.3)
    server = MetricsServer("127.0.0.1:0", new_registry())
    deadline = time.monotonic() + 60
    try:
        with socket.create_connection(("127.0.0.1", port(server)), timeout=30) as drip:
            drip.settimeout(0.05)
            drip.sendall(b"GET /metrics HTTP/1.1\r\nx: ")
            while time.monotonic() < deadline:
                try:
                    drip.sendall(b"a")
                    if drip.recv(1) == b"":
                        return
                except TimeoutError:
                    continue
                except OSError:
                    return
        raise AssertionError("it was not cut")
    finally:
        server.close()
