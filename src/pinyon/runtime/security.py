"""The credentials of a process: its TLS files and the cluster secret, in one place for all protocols.

gRPC, HTTPS, Redis and the transfer engine take their files from here, and get the new ones after a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.files import read_file
from pinyon.runtime.identity import BLOCKS_NAME, Identity
from pinyon.runtime.settings import ServiceSettings
from pinyon.runtime.watch import FileWatch

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls
    from pinyon.transfer import TlsContexts

SECRET_BYTES_MAX = 4096


@dataclass(frozen=True)
class Security:
    """The credentials; without TLS files all connections are plain, and a missing secret is empty."""

    tls: Tls | None = None
    secret: bytes = field(default=b"", repr=False)
    channels: Channels = PLAIN_CHANNELS
    _renewals: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def on_renewal(self, renew: Callable[[], None]) -> None:
        """Registers ``renew``, which is called in a thread after the files have changed and are good; it may raise."""
        self._renewals.append(renew)

    def renew(self) -> None:
        """Reads the files again. Raises :class:`InvalidArgument` if they cannot be used; then the old ones stay."""
        if self.tls is not None:
            self.tls.renew()
            for renew in self._renewals:
                renew()

    def transfer_tls(self) -> TlsContexts | None:
        """Returns contexts for the transfer engine, whose peers are workers and store nodes; renewals include them."""
        if self.tls is None:
            return None
        from pinyon.transfer import TlsContexts  # imported with TLS only, like cryptography

        contexts = TlsContexts(*self.tls.paths, peer_name=BLOCKS_NAME)
        self.on_renewal(contexts.renew)
        return contexts


NO_SECURITY = Security()


def load_security(settings: ServiceSettings, role: str = "") -> Security:
    """Loads the settings' files. The certificate must be for the ``role``, if given, and the settings' instance id.

    Raises :class:`InvalidArgument` if the certificate is another process's, or a file cannot be used (``field`` names
    the setting)."""
    secret = read_secret(Path(settings.cluster_secret_file)) if settings.cluster_secret_file else b""
    if not settings.has_tls:
        return Security(secret=secret, channels=Channels())
    from pinyon.runtime.tls import Tls  # imports cryptography, which takes 0.1 s and 10 MB

    tls = Tls(*settings.tls_paths)
    own = tls.material.identity
    if role and not own.covers(role, settings.instance_id or own.instance_id):
        raise InvalidArgument(
            f"{settings.tls_cert} is that of {own}, and this is {role} {settings.instance_id}".rstrip(),
            field="tls_cert",
        )
    Identity(own.role, settings.instance_id)  # raises for an id that no certificate can name: no peer would find it
    return Security(tls, secret, Channels(tls))


async def load_watched_security(settings: ServiceSettings, role: str, files: FileWatch) -> Security:
    """Loads the settings' files as :func:`load_security` does, and again whenever they change."""
    if settings.has_tls:  # added before the files are read, so that no change is missed
        files.add("certificate", settings.tls_paths, lambda: security.renew(), lambda _: None)
        files.start()
    security = load_security(settings, role)
    return security


def read_secret(path: Path) -> bytes:
    """Reads the cluster secret. Raises :class:`InvalidArgument` if the file cannot be used."""
    secret = read_file(path, 2 * SECRET_BYTES_MAX, "cluster_secret_file").strip()
    if not 0 < len(secret) <= SECRET_BYTES_MAX:
        raise InvalidArgument(f"{path}: a secret has 1 to {SECRET_BYTES_MAX} bytes", field="cluster_secret_file")
    return secret
