"""Certificates for tests, as ``pinyon certs`` makes them, and invalid ones that it never makes."""

from __future__ import annotations

import datetime
from pathlib import Path

from pinyon.runtime.certificates import Authority, Wanted
from pinyon.runtime.identity import Identity, hosts_of
from pinyon.runtime.tls import Tls


class TestAuthority:
    """A certificate authority in a folder of its own."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self.now = datetime.datetime.now(datetime.UTC)
        self.authority = Authority.open(root, self.now)

    def folder(self, role: str, instance_id: str = "", *, region: str = "", ended: bool = False) -> Path:
        """Returns a folder with new files for that process; with ``ended`` they expired yesterday."""
        now = self.now - datetime.timedelta(days=31) if ended else self.now
        identity = Identity(role, instance_id)
        return self.authority.issue(Wanted(identity, hosts_of(identity, (), region)), now, days=30)

    def tls(self, role: str, instance_id: str = "", *, region: str = "") -> Tls:
        return tls_of(self.folder(role, instance_id, region=region))


def tls_of(folder: Path) -> Tls:
    return Tls(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
