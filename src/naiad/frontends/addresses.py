"""What is said of an address that cannot be listened at. Pure."""

import errno

from naiad.errors import Unavailable


def cannot_listen(service: str, address: str, port: int, error: OSError) -> Unavailable:
    """The error of a service that does not start: in Triton's words, which scripts look for, where the port is taken.

    An error without a number, as grpcio's are, is taken for that, as Triton takes all.
    """
    if error.errno in (errno.EADDRINUSE, None):
        text = f"failed to start {service}: Unavailable - Socket '{address}:{port}' already in use"
    else:
        text = f"failed to start {service} at {address}:{port}: {error.strerror or error}"
    return Unavailable(f"{text}. Choose another address or port, or end what uses it.")
