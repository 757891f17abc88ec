"""The TLS files of a process: accepted files, refused files, and the effect of a renewal."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.identity import Identity
from pinyon.runtime.security import load_security
from pinyon.runtime.settings import ServiceSettings
from pinyon.runtime.tls import read_material
from tests.tls_files import TestAuthority, tls_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "certs")


def test_the_key_is_in_no_repr(authority: TestAuthority) -> None:
    folder = authority.folder("worker", "a")
    material = read_material(folder / "tls.crt", folder / "tls.key", folder / "ca.crt", authority.now.timestamp())
    assert b"PRIVATE KEY" in material.key
    assert "PRIVATE KEY" not in repr(material)


def test_a_folder_says_who_it_is_for(authority: TestAuthority) -> None:
    tls = authority.tls("worker", "prefill-0")
    assert tls.material.identity == Identity("worker", "prefill-0")
    assert authority.tls("lb").material.identity == Identity("lb", "")
    days = (tls.material.not_after_s - authority.now.timestamp()) / 86400
    assert days == pytest.approx(30, abs=0.01)


def test_secrets_are_for_their_owner_only(authority: TestAuthority) -> None:
    folder = authority.folder("worker", "a")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.crt": 0o644, "tls.crt": 0o644, "tls.key": 0o600, "cluster.secret": 0o600}
    assert stat.S_IMODE((folder.parent.parent / "ca").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.parent.parent / "ca" / "ca.key").stat().st_mode) == 0o600


def test_an_authority_is_made_once_and_signs_with_the_same_key(authority: TestAuthority, tmp_path: Path) -> None:
    again = TestAuthority(tmp_path / "certs")
    assert again.authority.certificate == authority.authority.certificate
    assert again.authority.secret == authority.authority.secret
    tls_of(again.folder("lb", "lb-0"))
    other = TestAuthority(tmp_path / "other")
    assert other.authority.secret != authority.authority.secret


def broken(case: str, authority: TestAuthority, tmp_path: Path) -> Path:
    """Returns a folder that must not be accepted."""
    folder = authority.folder("worker", "a")
    other = authority.folder("worker", "b")
    if case == "missing":
        (folder / "tls.key").unlink()
    elif case == "other key":
        shutil.copy(other / "tls.key", folder / "tls.key")
    elif case == "no key":
        (folder / "tls.key").write_text("hello")
    elif case == "no certificate":
        (folder / "tls.crt").write_bytes(b"\xff\xfe")
    elif case == "other authority":
        shutil.copy(TestAuthority(tmp_path / "other").folder("worker", "a") / "ca.crt", folder / "ca.crt")
    elif case == "ended":
        return authority.folder("worker", "a", ended=True)
    elif case == "huge":
        (folder / "ca.crt").write_bytes(bytes(2 << 20))
    return folder


CASES = {
    "missing": "tls_key",
    "other key": "tls_key",
    "no key": "tls_key",
    "no certificate": "tls_cert",
    "other authority": "tls_ca",
    "ended": "tls_cert",
    "huge": "tls_ca",
}


@pytest.mark.parametrize(("case", "field"), CASES.items())
def test_what_does_not_fit_names_the_setting(case: str, field: str, authority: TestAuthority, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tls_of(broken(case, authority, tmp_path))
    assert caught.value.field == field


def test_a_process_says_which_option_and_what_makes_the_files(authority: TestAuthority, tmp_path: Path) -> None:
    folder, nowhere = authority.folder("worker", "a"), tmp_path / "no"

    def told(**given: str) -> str:
        settings = ServiceSettings(**given)
        with pytest.raises(InvalidArgument) as caught:
            load_security(settings, "worker")
        return settings.in_words(caught.value, "worker")

    said = told(tls_dir=str(nowhere), instance_id="a")
    assert said.startswith(f"--tls-dir: cannot read {nowhere}/cluster.secret: ")
    assert said.endswith("; `pinyon certs DIR worker/a` makes the files, in DIR/worker/a")
    assert "`pinyon certs DIR worker/_any`" in told(tls_dir=str(nowhere))
    assert told(tls_dir=str(folder), instance_id="b").startswith(f"--tls-dir: {folder}/tls.crt is that of worker a")
    assert told(tls_dir=str(folder), tls_ca=str(nowhere)).startswith(f"--tls-ca: cannot read {nowhere}: ")
    assert told(tls_dir=f"{folder}/", tls_cert=str(nowhere)).startswith("--tls-cert: ")


@pytest.mark.parametrize("case", CASES)
def test_a_renewal_that_does_not_fit_changes_nothing(case: str, authority: TestAuthority, tmp_path: Path) -> None:
    tls = authority.tls("worker", "a")
    before = tls.channel_credentials, tls.client_context, tls.material.not_after_s
    broken(case, authority, tmp_path)
    with pytest.raises(InvalidArgument):
        tls.renew()
    assert (tls.channel_credentials, tls.client_context, tls.material.not_after_s) == before


def test_a_renewal_is_of_the_same_process(authority: TestAuthority) -> None:
    tls, other = authority.tls("worker", "a"), authority.folder("worker", "b")
    for name in ("tls.crt", "tls.key"):
        shutil.copy(other / name, tls.certificate.parent / name)
    with pytest.raises(InvalidArgument, match="worker b"):
        tls.renew()
    authority.folder("worker", "a")
    before = tls.channel_credentials
    tls.renew()
    assert tls.channel_credentials is not before


def settings(folder: Path, **values: str) -> ServiceSettings:
    return ServiceSettings(tls_dir=str(folder), **values)  # type: ignore[arg-type]


def test_a_process_is_who_its_certificate_says(authority: TestAuthority) -> None:
    folder = authority.folder("worker", "a")
    security = load_security(settings(folder, instance_id="a"), "worker")
    assert security.tls is not None
    assert security.secret == authority.authority.secret.strip()
    load_security(settings(folder), "worker")  # the certificate names the instance
    load_security(settings(authority.folder("worker"), instance_id="a-1"), "worker")
    for role, instance_id in (("worker", "b"), ("lb", "a"), ("lb", "")):
        with pytest.raises(InvalidArgument, match="is that of worker a") as caught:
            load_security(settings(folder, instance_id=instance_id), role)
        assert caught.value.field == "tls_cert"
    with pytest.raises(InvalidArgument, match="cannot be in a certificate"):
        load_security(settings(authority.folder("worker"), instance_id="A_1"), "worker")


def test_the_secret_alone_needs_no_tls(authority: TestAuthority, tmp_path: Path) -> None:
    file = authority.folder("worker", "a") / "cluster.secret"
    security = load_security(ServiceSettings(cluster_secret_file=str(file)), "worker")
    assert (security.tls, security.secret) == (None, authority.authority.secret.strip())
    assert "secret=" not in repr(security)
    for content in (b"", b" \n", bytes(5000)):
        file.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"1 to|larger than") as caught:
            load_security(ServiceSettings(cluster_secret_file=str(file)), "worker")
        assert caught.value.field == "cluster_secret_file"
    with pytest.raises(InvalidArgument, match="cannot read"):
        load_security(ServiceSettings(cluster_secret_file=str(tmp_path / "none")), "worker")


def test_a_replaced_file_is_never_half_there(authority: TestAuthority) -> None:
    """The file is renamed into place: an open handle keeps the old content, and no temporary file stays."""
    folder = authority.folder("worker", "a")
    with (folder / "tls.crt").open("rb") as old:
        before = os.fstat(old.fileno()).st_ino
        authority.folder("worker", "a")
        x509.load_pem_x509_certificate(old.read())
    assert (folder / "tls.crt").stat().st_ino != before
    assert {path.name for path in folder.iterdir()} == {"ca.crt", "tls.crt", "tls.key", "cluster.secret"}


SERVER = """
import sys
import grpc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.tls_files import tls_of
server = grpc.server(ThreadPoolExecutor(1))
print(server.add_secure_port("127.0.0.1:0", tls_of(Path(sys.argv[1])).server_credentials(ask_clients=True)), flush=True)
server.start()
sys.stdin.read()
server.stop(None).wait(60)
"""
"""A server in a process of its own, because the error that the test looks for ends the process."""
DIALS = 8_000
"""The number of dials; some hundred were enough on two processors."""


def test_a_server_outlives_strangers_that_dial_on_and_on(authority: TestAuthority) -> None:
    """The server's credentials were made anew for each connection; two at a time then read freed memory."""
    folder = str(authority.folder("worker", "a"))
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def dial(_: int) -> None:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
                # The client closes without a trace, so that ports do not run out.
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        with ThreadPoolExecutor(8) as threads:
            for _ in threads.map(dial, range(DIALS)):
                assert process.poll() is None
        process.communicate(timeout=120)  # ends its input
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=120)
