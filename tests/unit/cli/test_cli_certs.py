"""The files that ``pinyon certs`` makes, keeps and renews."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography import x509

from pinyon.cli import main
from pinyon.runtime.identity import Identity
from tests.tls_files import tls_of


def serial(folder: Path) -> int:
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes()).serial_number


def names(folder: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]


def test_each_process_gets_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "certs"
    processes = ["worker/prefill-0", "worker/_any", "lb/lb-0", "admin/anna"]
    assert main(["certs", str(root), *processes, "--host", "lb.example.org", "192.0.2.7"]) == 0
    assert tls_of(root / "worker" / "prefill-0").material.identity == Identity("worker", "prefill-0")
    assert tls_of(root / "worker" / "_any").material.identity == Identity("worker", "")
    assert names(root / "lb" / "lb-0") == [
        *("lb-0.lb.pinyon", "lb.pinyon", "lb.example.org", "localhost"),
        *("192.0.2.7", "127.0.0.1", "::1"),
    ]
    assert "lb.example.org" not in names(root / "worker" / "prefill-0")
    secrets = {(folder / "cluster.secret").read_bytes() for folder in root.glob("*/*") if folder.is_dir()}
    assert len(secrets) == 1
    assert "worker prefill-0, good until" in capsys.readouterr().out


def test_a_local_cluster(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path), "--cluster", "--prefill", "1", "--decode", "1"]) == 0
    made = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("*/*/tls.crt")}
    assert made == {
        *("admin/admin", "conductor/conductor", "controller/controller", "redis/redis"),
        *("worker/prefill-0", "worker/decode-0", "kvstore/kvstore-0", "lb/lb-0"),
    }


def test_what_is_good_is_kept_and_what_ends_soon_is_made_anew(tmp_path: Path) -> None:
    lb, worker = tmp_path / "lb" / "a", tmp_path / "worker" / "a"
    asked = ["certs", str(tmp_path), "lb/a", "worker/a"]
    assert main([*asked, "--host", "example.org", "--days", "90"]) == 0
    first = serial(lb), serial(worker)
    authority = (tmp_path / "ca" / "ca.crt").read_bytes()
    assert main([*asked, "--days", "90"]) == 0
    assert (serial(lb), serial(worker)) == first
    assert main([*asked, "--host", "other.example.org"]) == 0, "another host: another certificate"
    assert serial(lb) != first[0]
    assert serial(worker) == first[1]
    assert {"example.org", "other.example.org"} <= set(names(lb))
    assert main([*asked, "--days", "400"]) == 0, "90 days are less than a third of 400"
    assert serial(worker) != first[1]
    second = serial(lb), serial(worker)
    assert main(["certs", str(tmp_path), "--renew"]) == 0
    assert not {serial(lb), serial(worker)} & set(second)
    assert {"example.org", "other.example.org"} <= set(names(lb)), "hosts stay"
    assert (tmp_path / "ca" / "ca.crt").read_bytes() == authority


def test_a_load_balancers_certificate_names_its_region(tmp_path: Path) -> None:
    folder = tmp_path / "lb" / "a"
    assert main(["certs", str(tmp_path), "lb/a@eu", "--host", "example.org"]) == 0
    assert "eu.region.pinyon" in names(folder)
    first = serial(folder)
    assert main(["certs", str(tmp_path), "lb/a@eu"]) == 0
    assert serial(folder) == first
    assert main(["certs", str(tmp_path), "--renew"]) == 0
    assert "eu.region.pinyon" in names(folder)
    assert main(["certs", str(tmp_path), "lb/a@us"]) == 0
    assert {"us.region.pinyon", "example.org"} <= set(names(folder))
    assert "eu.region.pinyon" not in names(folder), "it moved"


def test_files_can_be_given_away(tmp_path: Path) -> None:
    owner = f"{os.getuid()}:{os.getgid()}"
    assert main(["certs", str(tmp_path), "lb/a", "--owner", owner]) == 0
    assert (tmp_path / "lb" / "a" / "tls.key").stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "say whose certificates"),
        (["nonsense/a"], "no role"),
        (["worker"], "ROLE/ID"),
        (["worker/A_1"], "cannot be in a certificate"),
        (["worker/.."], "cannot be in a certificate"),
        (["lb/a", "--days", "0"], "--days"),
        (["lb/a@"], "1 to 64 letters"),
        (["lb/a@r\xe9g"], "REGION must be a name of 1 to 64 letters"),
        *((["lb/a@" + region], "cannot be in a certificate") for region in ("a" * 64, "a..b", "a.")),
        (["worker/a@eu"], "only a load balancer"),
        (["lb/a", "--owner", "me"], "UID:GID"),
        (["--cluster", "--prefill", "-1"], "0 to 1024"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "certs"
    assert main(["certs", str(root), *arguments]) == 1
    assert word in capsys.readouterr().err
    assert not root.exists()


def test_an_authority_that_cannot_be_used_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path), "lb/a"]) == 0
    (tmp_path / "ca" / "ca.key").write_text("hello")
    assert main(["certs", str(tmp_path), "lb/b"]) == 1
    assert "the authority in" in capsys.readouterr().err
