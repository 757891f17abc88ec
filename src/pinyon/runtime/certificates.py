"""The files of a cluster with TLS: an authority, a secret, and per process a folder with its certificate.

::

    DIR/ca/ca.crt ca.key cluster.secret         keep it where no service runs: who has ca.key can be anybody
    DIR/<role>/<instance id>/ca.crt tls.crt tls.key cluster.secret
    DIR/<role>/_any/...                         for any instance of the role

Keys are ECDSA P-256. A file is replaced by renaming, so that a reader sees either the old or the new one."""

from __future__ import annotations

import datetime
import os
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.identity import ANY, Identity, identity_from_names

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 90
DAYS_MAX = 3650
SECRET_BYTES = 32
_SKEW = datetime.timedelta(hours=1)
"""The time by which a certificate's validity begins in the past, since clocks differ."""


@dataclass(frozen=True)
class Wanted:
    """A certificate to make, valid for its own names and for ``hosts``: names and IP addresses."""

    identity: Identity
    hosts: tuple[str, ...] = ()


def folder_of(root: Path, identity: Identity) -> Path:
    """Returns the folder with the files of a process."""
    return root / identity.role / (identity.instance_id or ANY)


@dataclass(frozen=True)
class Authority:
    """The authority that signs the certificates of one cluster."""

    root: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def open(cls, root: Path, now: datetime.datetime) -> Authority:
        """Returns the authority in ``root``, which is made if there is none.

        Raises :class:`InvalidArgument` if the one there cannot be used, or the folder cannot be written."""
        folder = root / "ca"
        try:
            if not (folder / "ca.key").exists():
                cls._make(folder, now)
            key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())[-1]
            secret = (folder / "cluster.secret").read_bytes()
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgument(f"the authority in {folder} cannot be used: {error}", field="dir") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise InvalidArgument(f"{folder}/ca.key is not the key of {folder}/ca.crt", field="dir")
        return cls(root, certificate, key, secret)

    @staticmethod
    def _make(folder: Path, now: datetime.datetime) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pinyon cluster {secrets.token_hex(4)}")])
        usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
        certificate = (
            _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, SHA256())
        )
        _write(folder / "cluster.secret", secrets.token_hex(SECRET_BYTES).encode() + b"\n", 0o600)
        _write(folder / "ca.crt", certificate.public_bytes(Encoding.PEM), 0o644)
        _write(folder / "ca.key", _key_pem(key), 0o600)  # last, as its presence means that all files are there

    def issue(
        self,
        wanted: Wanted,
        now: datetime.datetime,
        days: float = CERTIFICATE_DAYS,
        owner: tuple[int, int] | None = None,
    ) -> Path:
        """Writes the folder of a process, with a new key, and returns the folder.

        The certificate is valid for ``days``. ``owner`` is the user and group id that the files are given to."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = wanted.identity.names
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        usage = dict.fromkeys(_USAGES, False) | {"digital_signature": True}
        certificate = (
            _builder(subject, self.certificate.subject, key.public_key(), now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([*map(x509.DNSName, names), *map(_host_name, wanted.hosts)]), critical=False
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, SHA256())
        )
        folder = folder_of(self.root, wanted.identity)
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            authorities = (self.root / "ca" / "ca.crt").read_bytes()  # two authorities while one replaces the other
            _write(folder / "ca.crt", authorities, 0o644, owner)
            _write(folder / "cluster.secret", self.secret, 0o600, owner)
            _write(folder / "tls.key", _key_pem(key), 0o600, owner)
            _write(folder / "tls.crt", certificate.public_bytes(Encoding.PEM), 0o644, owner)
        except OSError as error:
            raise InvalidArgument(f"cannot write {folder}: {error.strerror}", field="dir") from None
        return folder

    def found(self) -> Iterable[tuple[Wanted, datetime.datetime]]:
        """Yields the certificates issued before, as read from the folder, and when each ends."""
        for path in sorted(self.root.glob("*/*/tls.crt")):
            try:
                certificate = x509.load_pem_x509_certificate(path.read_bytes())
                names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            except (OSError, ValueError, x509.ExtensionNotFound):
                continue
            dns = names.get_values_for_type(x509.DNSName)
            identity = identity_from_names(dns)
            if identity is not None and folder_of(self.root, identity) == path.parent:
                hosts = [name for name in dns if name not in identity.names]
                hosts += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
                yield Wanted(identity, tuple(hosts)), certificate.not_valid_after_utc


_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime.datetime, days: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise InvalidArgument(f"{host!r} is no host name and no IP address", field="host") from None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Replaces ``path`` by a complete new file, which nobody else can read before."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, mode)
            if owner is not None:
                os.fchown(handle, *owner)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
