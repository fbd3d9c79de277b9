"""TLS of the services: from files to a context. Reads files; used once, at the start."""

import ssl
from pathlib import Path

from naiad.errors import InvalidArgument


def server_context(service: str, protocol: str, certificate: str, key: str, root: str = "") -> ssl.SSLContext:
    """The context of a server with this certificate and key; with `root`, clients must show a certificate that is
    signed by it. All are paths of PEM files. `service` is what its options begin with, `protocol` the name that ALPN
    has for what is spoken. Raises InvalidArgument, naming the option, for what cannot be used."""
    for flag, path in (("server-cert", certificate), ("server-key", key), ("root-cert", root)):
        if path:
            _check_readable(f"--{service}-{flag}", path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    try:
        # Without a password: asking for one would wait at a terminal that a server does not have.
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(
            f"--{service}-server-cert={certificate} and --{service}-server-key={key} are no certificate and its key in "
            f"PEM form: {error}"
        ) from error
    if root:
        try:
            context.load_verify_locations(root)
        except ssl.SSLError as error:
            raise InvalidArgument(f"--{service}-root-cert={root} is no certificate in PEM form: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(flag: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise InvalidArgument(f"{flag}={path} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; keys without a password are expected")
