"""The certificate that the HTTP server presents: its own, or the cluster's."""

from __future__ import annotations

import ssl
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.security import Security


class Https:
    """The TLS context of the HTTP server. Connections made after :meth:`renew` get the new certificate."""

    context: ssl.SSLContext
    """The context of new connections."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Loads the files. Raises :class:`InvalidArgument`."""
        self.files = (certificate, key)
        self.renew()

    @classmethod
    def of(cls, certificate: str, key: str, security: Security) -> Https | None:
        """Returns the certificate to use, or None for plain HTTP. Raises :class:`InvalidArgument`."""
        if certificate:
            try:
                return cls(Path(certificate), Path(key))
            except InvalidArgument as error:
                raise InvalidArgument(error.message, field="http_tls_cert") from None
        return None if security.tls is None else cls(security.tls.certificate, security.tls.key)

    def renew(self) -> None:
        """Loads the files again, from any thread. Raises :class:`InvalidArgument`; the old certificate stays then."""
        from pinyon.runtime.tls import server_context  # imported with TLS only, as it imports cryptography

        # A new context, as handshakes on the event loop would find half a certificate in one that is being loaded.
        self.context = server_context(*self.files)
