"""The texts of addresses that cannot be listened at."""

import errno
import os

import pytest

from naiad.frontends.addresses import cannot_listen

TAKEN = "failed to start GRPC service: Unavailable - Socket '0.0.0.0:8001' already in use. "
HINT = "Choose another port (--grpc-port) or address (--grpc-address), or end what uses it."


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), TAKEN),
        (
            OSError(errno.EACCES, os.strerror(errno.EACCES)),
            "failed to start GRPC service at 0.0.0.0:8001: Permission denied. ",
        ),
    ],
)
def test_the_reason_is_said(error: OSError, text: str) -> None:
    assert cannot_listen("GRPC service", "0.0.0.0", 8001, error).message == text + HINT
