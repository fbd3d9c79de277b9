"""The one table from the kind of an error to its gRPC status. Pure."""

from grpc import StatusCode

from naiad.errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    NaiadError,
    NotFound,
    Unavailable,
    Unknown,
    Unsupported,
)

_STATUS: dict[type[NaiadError], StatusCode] = {
    Unknown: StatusCode.UNKNOWN,
    InvalidArgument: StatusCode.INVALID_ARGUMENT,
    NotFound: StatusCode.NOT_FOUND,
    Unavailable: StatusCode.UNAVAILABLE,
    Unsupported: StatusCode.UNIMPLEMENTED,
    AlreadyExists: StatusCode.ALREADY_EXISTS,
    Cancelled: StatusCode.CANCELLED,
    Internal: StatusCode.INTERNAL,
}

#: What a client is told whose call comes too late.
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."

#: Clients refuse trailers beyond 8 KiB with an error of their own, which would hide ours.
_DETAILS_LIMIT = 6000


def status(error: NaiadError) -> tuple[StatusCode, str]:
    """The status code and details of an error: those of the nearest kind it is derived from."""
    details = error.message
    if len(details) > _DETAILS_LIMIT:
        details = f"{details[:_DETAILS_LIMIT]}..."
    for kind in type(error).__mro__:
        code = _STATUS.get(kind)
        if code is not None:
            return code, details
    return StatusCode.UNKNOWN, details
