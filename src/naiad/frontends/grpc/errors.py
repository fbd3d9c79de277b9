"""The one table from the kind of an error to its gRPC status. Pure."""

from grpc import StatusCode

from naiad.errors import NaiadError

#: By Triton's code of the kind, and one of gRPC's own.
_STATUS = {
    "INVALID_ARG": StatusCode.INVALID_ARGUMENT,
    "NOT_FOUND": StatusCode.NOT_FOUND,
    "UNAVAILABLE": StatusCode.UNAVAILABLE,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
    "ALREADY_EXISTS": StatusCode.ALREADY_EXISTS,
    "CANCELLED": StatusCode.CANCELLED,
    "INTERNAL": StatusCode.INTERNAL,
    "RESOURCE_EXHAUSTED": StatusCode.RESOURCE_EXHAUSTED,
}
_CODES: dict[str, int] = {kind: code.value[0] for kind, code in _STATUS.items()}
_UNKNOWN: int = StatusCode.UNKNOWN.value[0]


class MessageTooLarge(NaiadError):
    """A message exceeds gRPC's limit."""

    triton_code = "RESOURCE_EXHAUSTED"


#: What a client is told whose call comes too late.
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."

#: Clients refuse trailers beyond 8 KiB with an error of their own, which would hide ours.
_DETAILS_LIMIT = 6000


def status(error: NaiadError) -> tuple[int, str]:
    """The number of the status code, and the details, of an error."""
    details = error.message
    if len(details) > _DETAILS_LIMIT:
        details = f"{details[:_DETAILS_LIMIT]}..."
    return _CODES.get(error.triton_code, _UNKNOWN), details
