"""Certificates for servers on loopback; each is its own authority."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import pathlib
from collections.abc import Iterator

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.sim.server import SimConfig

_DAY = datetime.timedelta(days=1)


def secured(folder: pathlib.Path, *, host: str = "127.0.0.1", expired: bool = False) -> SimConfig:
    """Return a simulated server that has a certificate for an address, as PEM files in a folder."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    ends = now - _DAY if expired else now + _DAY
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(ends)
        .add_extension(address, critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(pem))
    key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return SimConfig("m", speed=0, ssl_certfile=str(cert_file), ssl_keyfile=str(key_file))


@contextlib.contextmanager
def trusting(config: SimConfig) -> Iterator[None]:
    """Have this process trust the certificate of a server, and no other, as OpenSSL is told to."""
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(config.ssl_certfile)
    try:
        yield
    finally:
        del os.environ["SSL_CERT_FILE"]
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before
