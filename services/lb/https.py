"""The certificate that the HTTP server shows: its own, or the cluster's."""

from __future__ import annotations

import ssl
from pathlib import Path

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.security import Security
from services.lb.settings import LbSettings

__all__ = ["Https"]


class Https:
    """``context`` lasts as long as the server; connections made after :meth:`renew` are shown the new certificate."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises :class:`InvalidArgument`."""
        from pinyon.runtime.tls import server_context  # with TLS only: it brings cryptography

        self.files = (certificate, key)
        self.context = server_context(certificate, key)

    @classmethod
    def of(cls, settings: LbSettings, security: Security) -> Https | None:
        """None: plain HTTP. Raises :class:`InvalidArgument`."""
        if settings.http_tls_cert:
            try:
                return cls(Path(settings.http_tls_cert), Path(settings.http_tls_key))
            except InvalidArgument as error:
                raise InvalidArgument(error.message, field="http_tls_cert") from None
        return None if security.tls is None else cls(security.tls.certificate, security.tls.key)

    def renew(self) -> None:
        """Raises :class:`ssl.SSLError` or another :class:`OSError`; the old certificate stays then."""
        # Into another one first: what does not fit would leave this one with half of it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self.files)
        self.context.load_cert_chain(*self.files)
