"""TLS on tcp links: both sides prove that they are of the cluster, or fail soon and with a reason."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pinyon.transfer import InvalidTransfer, Opcode, Reason, TransferEngine, TransferLimits, TransferRequest, Transports
from pinyon.transfer.links.tls import TlsContexts
from tests.unit.transfer.conftest import FAST, GENEROUS_S, PATIENT, eventually, nothing_left_behind
from tests.unit.transfer.listeners import Proxy

READ, WRITE = Opcode.READ, Opcode.WRITE
Files = tuple[Path, Path, Path]
SIZE = 3 << 20
LIMITS = replace(PATIENT, max_attempts=2)

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")


@pytest.fixture(scope="module")
def make_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """The function ``make_files(ca)``, which returns a certificate signed by the CA of that name, made on first use."""
    folder = tmp_path_factory.mktemp("tls")
    serial = iter(range(1, 100))

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    def make(ca: str) -> Files:
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        if not (folder / f"{ca}.pem").exists():
            openssl("req", "-x509", *new_key, "-subj", f"/CN={ca}", "-keyout", f"{ca}.key", "-out", f"{ca}.pem")
        name = f"node{next(serial)}"
        openssl("req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")
        return folder / f"{name}.pem", folder / f"{name}.key", folder / f"{ca}.pem"

    return make


def engine(files: Files | None, limits: TransferLimits = LIMITS, checksum: str = "on", **named) -> TransferEngine:
    transports = Transports(("tcp",), checksum=checksum)
    return TransferEngine(
        transports=transports, limits=limits, tls=None if files is None else TlsContexts(*files), **named
    )


def requests(one: TransferEngine, other: TransferEngine, near: bytearray, far: bytearray, opcode: Opcode):
    local, remote = one.register_local_memory(near), other.register_local_memory(far)
    return [
        TransferRequest(opcode, local.key, at, other.descriptor(), remote.key, at, length)
        for at, length in ((0, 1), (1, 4095), (4096, 100_000), (1 << 20, 2 << 20))
    ]


@pytest.mark.parametrize("checksum", ["on", "off"])
@pytest.mark.parametrize("secret", [None, b"cluster secret"])
def test_bytes_arrive(make_files, secret, checksum) -> None:
    near, far = bytearray(random.Random(1).randbytes(SIZE)), bytearray(SIZE)
    with (
        nothing_left_behind(),
        engine(make_files("ca"), secret=secret, checksum=checksum) as one,
        engine(make_files("ca"), secret=secret) as other,
    ):
        assert all(result.ok for result in one.transfer(requests(one, other, near, far, WRITE)))
        for at, length in ((0, 104_096), (1 << 20, 2 << 20)):
            assert far[at : at + length] == near[at : at + length]
        back = bytearray(SIZE)
        assert all(result.ok for result in one.transfer(requests(one, other, back, far, READ)))
        assert back == far


def test_nothing_readable_is_on_the_wire(make_files) -> None:
    """A tap between the two sees neither the payload nor the region's key."""
    near, far = bytearray(b"the secret words" * 1000), bytearray(16_000)
    seen = bytearray()

    def see(direction: str, offset: int, data: bytes) -> bytes:
        if direction == "there":
            seen.extend(data)
        return data

    with engine(make_files("ca")) as one, engine(make_files("ca")) as other:
        local, remote = one.register_local_memory(near), other.register_local_memory(far)
        descriptor = other.descriptor()
        with Proxy(descriptor.port, see) as tap:
            via = replace(descriptor, port=tap.port, nics=())
            assert one.transfer([TransferRequest(WRITE, local.key, 0, via, remote.key, 0, 16_000)])[0].ok
            one.close()
    assert len(seen) > 16_000
    assert far == near
    assert b"secret words" not in seen
    assert remote.key not in seen


@pytest.mark.parametrize(("mine", "theirs"), [("ca", "other ca"), ("ca", None), (None, "ca")])
def test_strangers_are_refused_within_the_limit(make_files, mine, theirs) -> None:
    near, far = bytearray(SIZE), bytearray(SIZE)
    with (
        nothing_left_behind(),
        engine(make_files(mine) if mine else None) as one,
        engine(make_files(theirs) if theirs else None) as other,
    ):
        results = one.transfer(requests(one, other, near, far, WRITE))
        assert {result.reason for result in results} == {Reason.UNAUTHENTICATED}
        eventually(lambda: other.stats().inbound_connections_now == 0, "the link ended")
        assert other.stats().auth_failures >= 1


def test_a_silent_initiator_is_shut_out(make_files) -> None:
    with engine(make_files("ca"), replace(FAST, connect_s=0.5)) as other:
        descriptor = other.descriptor()
        for first in (b"", b"\x16\x03\x01", b"nonsense that is no TLS"):
            with socket.create_connection((descriptor.host, descriptor.port), timeout=GENEROUS_S) as sock:
                sock.sendall(first)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
        eventually(lambda: other.stats().inbound_connections_now == 0, "the links ended")


def test_files_are_checked(make_files, tmp_path) -> None:
    certificate, key, ca = make_files("ca")
    contexts = TlsContexts(certificate, key, ca)
    assert contexts.server.minimum_version == contexts.client.minimum_version
    for broken in ((tmp_path / "none.pem", key, ca), (certificate, make_files("ca")[1], ca), (certificate, key, key)):
        with pytest.raises(InvalidTransfer) as caught:
            TlsContexts(*broken)
        assert caught.value.field == "tls"
