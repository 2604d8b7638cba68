"""TLS with one pinned, self-signed certificate: only a peer that shows it is the coordinator."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from hvdlab.collectives.errors import StartError

VALID_FOR = datetime.timedelta(days=365)


def client_context(certificate: str) -> ssl.SSLContext:
    """Settings of a client that trusts exactly this certificate (PEM text), whatever name it bears.

    Raises:
        StartError: The text is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate itself is pinned; its names say nothing, since ranks may reach the coordinator under any address.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise StartError(f"HVDLAB_CERT is no PEM certificate: {error}") from error
    return context


def require_same_certificate(sock: ssl.SSLSocket, certificate: str) -> None:
    """Raise ``StartError`` unless the other side showed exactly ``certificate`` (PEM text)."""
    if sock.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(certificate.strip() + "\n"):
        raise StartError("The coordinator shows another certificate than the one in HVDLAB_CERT.")


def new_certificate(host: str) -> tuple[str, str]:
    """A new self-signed certificate for ``host`` and its key, as PEM texts.

    Raises:
        StartError: ``cryptography`` is not installed.
    """
    certificate, key = _self_signed(host)
    return certificate.decode(), key.decode()


def server_context(directory: Path, certificate: str, key: str) -> ssl.SSLContext:
    """Settings of a listener with this certificate (PEM texts).

    The key is written to ``directory`` (which must be private) and removed before this returns.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    path = directory / "key.pem"
    path.touch(mode=0o600)
    try:
        path.write_text(certificate + key)
        context.load_cert_chain(path)
    finally:
        path.unlink()
    return context


def _self_signed(host: str) -> tuple[bytes, bytes]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise StartError(
            "Ranks on other hosts reach the coordinator over TLS, which needs the package cryptography: "
            "pip install hvdlab[tls]"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hvdlab coordinator")])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), secret
