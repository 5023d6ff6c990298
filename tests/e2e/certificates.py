"""An authority of the test's own, and certificates by it."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    certificate: bytes
    key: bytes
    encrypted_key: bytes
    serial: int

    def write(self, folder: Path) -> tuple[str, str]:
        """The paths of both files."""
        for name, content in (("tls.crt", self.certificate), ("tls.key", self.key)):
            (folder / name).write_bytes(content)
        return str(folder / "tls.crt"), str(folder / "tls.key")


class Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        built = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.certificate = _pem(built.sign(self._key, hashes.SHA256()))

    def pair(self) -> Pair:
        """For 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        built = _builder(name, self._name, key).add_extension(here, critical=False)
        signed = built.sign(self._key, hashes.SHA256())
        secret = serialization.BestAvailableEncryption(b"word")
        return Pair(_pem(signed), _key(key, serialization.NoEncryption()), _key(key, secret), signed.serial_number)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key(key: ec.EllipticCurvePrivateKey, secret: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
