"""The error for an unusable folder of TLS files names the option, the file, and the command that makes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pinyon.cli import main
from tests.tls_files import TestAuthority

MADE = "; `pinyon certs DIR admin/admin` makes the files, in DIR/admin/admin\n"
NOBODY = "127.0.0.1:1"
ASKED = [
    ["instances", "--conductor", NOBODY],
    ["generate", "x", "--lb", NOBODY],
    ["regions", "--controller", NOBODY],
    ["top", "--once", "--conductor", NOBODY, "--lb", NOBODY],
    ["top", "--once", "--metrics", NOBODY],
]


def broken(case: str, root: Path) -> tuple[Path, str]:
    """Returns a broken folder and the expected error message."""
    authority = TestAuthority(root)
    folder = authority.folder("admin", "admin")
    if case == "the authority's":  # instead of the admin's within
        return root, f"{root}/ca.crt"
    if case == "no authority":
        (folder / "ca.crt").write_text("hello")
        return folder, f"{folder}/ca.crt holds no PEM certificate"
    if case == "no key":
        (folder / "tls.key").unlink()
        return folder, f"{folder}/tls.key"
    if case == "no certificate":
        (folder / "tls.crt").write_text("hello")
        return folder, f"{folder}/tls.crt holds no PEM certificate"
    shutil.copy(authority.folder("lb", "lb-0") / "tls.key", folder)
    return folder, f"{folder}/tls.key is not the key of {folder}/tls.crt"


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
def test_folder_that_is_not_there(asked, tmp_path, capsys):
    assert main([*asked, "--tls-dir", str(tmp_path / "no")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("pinyon: --tls-dir (or PINYON_TLS_DIR): ")
    assert f"{tmp_path}/no/ca.crt" in said
    assert said.endswith(MADE)
    assert said.count("certs") == 1


@pytest.mark.parametrize("case", ["the authority's", "no authority", "no key", "no certificate", "another key"])
def test_files_that_do_not_fit(case, tmp_path, capsys):
    folder, said = broken(case, tmp_path / "certs")
    assert main(["instances", "--conductor", NOBODY, "--tls-dir", str(folder)]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith("pinyon: --tls-dir (or PINYON_TLS_DIR): ")
    assert told.endswith(MADE)


def test_transfer_names_the_option_too(tmp_path, capsys):
    assert main(["transfer", "serve", "--tls-dir", str(tmp_path / "no")]) == 1
    assert capsys.readouterr().err == (
        f"pinyon: --tls-dir: cannot read {tmp_path}/no/cluster.secret: No such file or directory; "
        "`pinyon certs DIR worker/_any` makes the files, in DIR/worker/_any\n"
    )
