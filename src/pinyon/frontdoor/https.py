"""The certificate that the HTTP server shows: its own, or the cluster's."""

from __future__ import annotations

import ssl
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.security import Security


class Https:
    """Connections made after :meth:`renew` are shown the new certificate."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises :class:`InvalidArgument`."""
        self.files = (certificate, key)
        self.context = self._made()
        """Of a connection that is made now."""

    def _made(self) -> ssl.SSLContext:
        from pinyon.runtime.tls import server_context  # with TLS only: it brings cryptography

        return server_context(*self.files)

    @classmethod
    def of(cls, certificate: str, key: str, security: Security) -> Https | None:
        """Returns ``None`` for plain HTTP. Raises :class:`InvalidArgument`."""
        if certificate:
            try:
                return cls(Path(certificate), Path(key))
            except InvalidArgument as error:
                raise InvalidArgument(error.message, field="http_tls_cert") from None
        return None if security.tls is None else cls(security.tls.certificate, security.tls.key)

    def renew(self) -> None:
        """From any thread. Raises :class:`InvalidArgument`; the old certificate stays then."""
        # In a context of its own: handshakes of the loop's would find one that is loaded into with half of it.
        self.context = self._made()
