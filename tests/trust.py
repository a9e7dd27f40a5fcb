"""Certificate authorities of tests, and servers that they vouch for.

Owns keys that live as long as a test. Refuses any name but 127.0.0.1.
"""

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class Authority:
    """A certificate authority of one test."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Key and certificate for 127.0.0.1, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            _unsigned(name, key)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return _pem_of(key), certificate.public_bytes(serialization.Encoding.PEM)


def make_authority(name: str) -> Authority:
    """A self-signed authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _unsigned(name, key)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(key, certificate)


def server_context(authority: Authority, folder: Path) -> ssl.SSLContext:
    """What a TLS server on 127.0.0.1 needs; `folder` holds its files for a moment."""
    key, certificate = authority.issue("server")
    key_file, certificate_file = folder / "key.pem", folder / "certificate.pem"
    key_file.write_bytes(key)
    certificate_file.write_bytes(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    return context


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _unsigned(name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    """A certificate for a day, issued by nobody yet."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
