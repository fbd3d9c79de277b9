"""Addresses that are listened at: how one is taken, and what is said of one that cannot be."""

import errno
import socket

from naiad.errors import Unavailable


def bound(address: str, port: int, shared: bool = False) -> socket.socket:
    """A socket bound to the first address of a host; others may bind `shared` ones, too. Raises OSError."""
    family = socket.getaddrinfo(address.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family[0], family[1])
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(family[4])
    except OSError:
        made.close()
        raise
    return made


def cannot_listen(service: str, address: str, port: int, error: OSError) -> Unavailable:
    """The error of a service that does not start: in Triton's words, which scripts look for, where the port is taken.

    `service` begins with the name that its options begin with.
    """
    if error.errno == errno.EADDRINUSE:
        text = f"failed to start {service}: Unavailable - Socket '{address}:{port}' already in use"
    else:
        text = f"failed to start {service} at {address}:{port}: {error.strerror or error}"
    option = service.split()[0].lower()
    return Unavailable(
        f"{text}. Choose another port (--{option}-port) or address (--{option}-address), or end what uses it."
    )
