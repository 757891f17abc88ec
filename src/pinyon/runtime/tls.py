"""The TLS files of a process: read, checked, converted for gRPC and ``ssl``, and read again when they change.

Open connections are not cut when files change; later connections use the new files."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.runtime.files import read_file
from pinyon.runtime.identity import Identity, identity_from_names

FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Material:
    """The contents of the files at one moment: PEM, as read."""

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes
    identity: Identity
    names: frozenset[str]
    """The DNS names of the certificate."""
    not_after_s: float
    """The Unix time at which the certificate ends."""


def read_material(certificate: Path, key: Path, ca: Path, now_s: float) -> Material:
    """Reads the three files and checks that they belong together, at the Unix time ``now_s``.

    Raises :class:`InvalidArgument` for a file that cannot be read or used (``field`` names the setting), or another
    certificate's key. It refuses a certificate that expired, has another authority, or names no role and instance."""
    raw = (
        read_file(certificate, FILE_BYTES_MAX, "tls_cert"),
        read_file(key, FILE_BYTES_MAX, "tls_key"),
        read_file(ca, FILE_BYTES_MAX, "tls_ca"),
    )
    chain = _certificates(raw[0], certificate, "tls_cert")
    own = chain[0]
    _check_key(raw[1], own, key, certificate)
    if not any(_issued(chain[-1], authority) for authority in _certificates(raw[2], ca, "tls_ca")):
        raise InvalidArgument(f"{certificate} is not signed by the authority in {ca}", field="tls_ca")
    ends_s = own.not_valid_after_utc.timestamp()
    if ends_s <= now_s:
        raise InvalidArgument(f"{certificate} ended on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", field="tls_cert")
    try:
        said = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = said.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = []
    identity = identity_from_names(names)
    if identity is None:
        raise InvalidArgument(f"{certificate} names no role and instance (make it with pinyon certs)", field="tls_cert")
    return Material(*raw, identity, frozenset(names), ends_s)


class Tls:
    """The TLS files of this process. After ``renew``, everything that is made later uses the new files."""

    def __init__(self, certificate: Path, key: Path, ca: Path, clock: Clock = time.time) -> None:
        """Reads the files; ``clock`` returns Unix time. Raises :class:`InvalidArgument` as :func:`read_material`."""
        self.certificate, self.key, self.ca = certificate, key, ca
        self._clock = clock
        self._use(read_material(certificate, key, ca, clock()))

    def _use(self, material: Material) -> None:
        """Makes everything from the files; changes nothing unless all parts can be made."""
        certificate, key, protocols = self.certificate, self.key, ["h2"]
        client, session_client = (_client_context(material, certificate, key) for _ in range(2))
        session_client.set_alpn_protocols(protocols)
        sessions = server_context(certificate, key, self.ca)
        sessions.set_alpn_protocols(protocols)
        self.channel_credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
        self.client_context = client
        """The context for clients of servers with certificates of the cluster, which checks the host's name."""
        self.sessions_context = sessions
        """The context of servers of sessions (:mod:`pinyon.runtime.http2`); clients have the cluster's certificates."""
        self.session_client_context = session_client
        """The context of the clients of sessions, who name the peer they mean."""
        self.material = material
        """The contents of the files that are in use."""

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return self.certificate, self.key, self.ca

    def server_credentials(self, *, ask_clients: bool) -> grpc.ServerCredentials:
        """Returns credentials of a gRPC server; connections made after a renewal show the new certificate.

        With ``ask_clients``, the server demands a certificate of the cluster; otherwise it asks for none."""
        given = self.material

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Returns a new configuration after a renewal, else None; gRPC core's threads call this at each handshake.

            It must never return the same configuration twice. The core would then free, without a lock, what other
            handshakes may be reading at that moment; eight clients that kept connecting crashed the process so. A
            renewal, once in weeks, still has such a moment: within some 100 ns of another handshake's start."""
            nonlocal given
            newest = self.material
            if given is newest:
                return None
            made = _configuration(newest)
            given = newest
            return made

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            fetch,  # type: ignore[arg-type]  # None is documented and not in the stubs
            require_client_authentication=ask_clients,
        )

    def server_context(self, *, ask_clients: bool) -> ssl.SSLContext:
        """Returns a context for an HTTPS server; make a new one after a renewal."""
        return server_context(self.certificate, self.key, self.ca if ask_clients else None)

    def renew(self) -> None:
        """Reads the files again. Raises :class:`InvalidArgument` if they cannot be used; then nothing changes."""
        material = read_material(*self.paths, self._clock())
        if material.identity != self.material.identity:
            raise InvalidArgument(
                f"{self.certificate} is that of {material.identity}; this is {self.material.identity}", field="tls_cert"
            )
        self._use(material)


def _client_context(material: Material, certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=material.ca.decode("ascii", "replace"))
    _load_chain(context, certificate, key)
    return context


def client_credentials(folder: Path) -> grpc.ChannelCredentials:
    """Returns credentials for clients' programs, from a folder of ``pinyon certs`` or one with only ``ca.crt``.

    Raises :class:`InvalidArgument` if the files cannot be used."""
    authority, own, private = folder / "ca.crt", folder / "tls.crt", folder / "tls.key"
    ca = read_file(authority, FILE_BYTES_MAX, "tls_dir")
    _certificates(ca, authority, "tls_dir")
    if not own.exists():
        return grpc.ssl_channel_credentials(ca)
    key, certificate = (read_file(path, FILE_BYTES_MAX, "tls_dir") for path in (private, own))
    _check_key(key, _certificates(certificate, own, "tls_dir")[0], private, own)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)


def server_context(certificate: Path, key: Path, ca: Path | None = None) -> ssl.SSLContext:
    """Returns a context for servers of clients' programs; with ``ca``, they need a certificate of that authority.

    Renewed files need a new context: while a certificate is loaded into an old one, handshakes would see half of it.
    Raises :class:`InvalidArgument` if the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, certificate, key)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ca)
    return context


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # includes ssl.SSLError
        raise InvalidArgument(f"{certificate} and {key} cannot be used: {error}", field="tls_cert") from None


def _certificates(pem: bytes, path: Path, field: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise InvalidArgument(f"{path} holds no PEM certificate", field=field) from None


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_key(pem: bytes, certificate: x509.Certificate, path: Path, certificate_path: Path) -> None:
    """Raises :class:`InvalidArgument` unless the key is that certificate's."""
    try:
        public = load_pem_private_key(pem, None).public_key()
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path} holds no private key that can be used: {error}", field="tls_key") from None
    if _spki(public) != _spki(certificate.public_key()):
        raise InvalidArgument(f"{path} is not the key of {certificate_path}", field="tls_key")


def _spki(public: object) -> bytes:
    encoded: bytes = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return encoded
