"""Certificates for tests: an authority, and what it signs, as PEM files on disk.

Owns keys that live for one test. Refuses names other than this machine's.
"""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `file` holds its own."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    file: Path

    def issue(self, folder: Path, common_name: str) -> tuple[Path, Path]:
        """Write `cert.pem` and `key.pem` of a name for 127.0.0.1, over what is there."""
        folder.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            _builder(_name(common_name), self.name, key)
            .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        files = folder / "cert.pem", folder / "key.pem"
        for file, data in zip(
            files,
            (
                certificate.public_bytes(Encoding.PEM),
                key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            ),
            strict=True,
        ):
            fresh = file.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.replace(file)
        return files


def make_authority(file: Path) -> Authority:
    """A new authority, whose certificate is written to `file`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(file.stem)
    certificate = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    file.write_bytes(certificate.public_bytes(Encoding.PEM))
    return Authority(name, key, file)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
