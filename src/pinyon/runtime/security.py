"""What a process proves itself by: its TLS files and the cluster secret, from one place for all it speaks.

gRPC, HTTPS, Redis and the transfer engine take theirs from here, and get the new files when these have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.identity import BLOCKS_NAME, Identity
from pinyon.runtime.settings import ServiceSettings

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls
    from pinyon.transfer import TlsContexts

SECRET_BYTES_MAX = 4096


@dataclass(frozen=True)
class Security:
    """Without TLS files all is plain; without a secret it is empty."""

    tls: Tls | None = None
    secret: bytes = field(default=b"", repr=False)
    channels: Channels = PLAIN_CHANNELS
    _renewals: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def not_after_s(self) -> float:
        """Unix time at which the certificate ends; infinite without one."""
        return math.inf if self.tls is None else self.tls.not_after_s

    def on_renewal(self, renew: Callable[[], None]) -> None:
        """``renew`` is called, in a thread, after the files have changed and are good; it may raise."""
        self._renewals.append(renew)

    def renew(self) -> None:
        """Read the files again. Raises :class:`InvalidArgument` when they are of no use; the old ones stay then."""
        if self.tls is not None:
            self.tls.renew()
            for renew in self._renewals:
                renew()

    def transfer_tls(self) -> TlsContexts | None:
        """For the transfer engine: its peers are workers and store nodes. Renewed with the rest."""
        if self.tls is None:
            return None
        from pinyon.transfer import TlsContexts, TlsFiles  # with TLS only, as cryptography

        contexts = TlsContexts(TlsFiles(*self.tls.paths, peer_name=BLOCKS_NAME))
        self.on_renewal(contexts.renew)
        return contexts


NO_SECURITY = Security()


def load_security(settings: ServiceSettings, role: str = "") -> Security:
    """From the settings' files; with a ``role``, the certificate must be one for it and the settings' instance id.

    Raises:
        InvalidArgument: a file cannot be used (``field`` names the setting), or the certificate is another's.
    """
    secret = read_secret(Path(settings.cluster_secret_file)) if settings.cluster_secret_file else b""
    if not settings.has_tls:
        return Security(secret=secret, channels=Channels())
    from pinyon.runtime.tls import Tls  # brings cryptography: 0.1 s and 10 MB for those who use it

    tls = Tls(*settings.tls_paths)
    own = tls.identity
    if role and not own.covers(role, settings.instance_id or own.instance_id):
        raise InvalidArgument(
            f"{settings.tls_cert} is that of {own}, and this is {role} {settings.instance_id}".rstrip(),
            field="tls_cert",
        )
    Identity(own.role, settings.instance_id)  # raises for an id that no certificate can say: no peer would find it
    return Security(tls, secret, Channels(tls))


def read_secret(path: Path) -> bytes:
    """Raises :class:`InvalidArgument`."""
    try:
        with path.open("rb") as file:
            secret = file.read(SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="cluster_secret_file") from None
    if not secret or len(secret) > SECRET_BYTES_MAX:
        raise InvalidArgument(f"{path}: a secret has 1 to {SECRET_BYTES_MAX} bytes", field="cluster_secret_file")
    return secret
