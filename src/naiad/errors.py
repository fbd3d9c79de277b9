"""The kinds of error.

Everything a user can cause or observe is a `NaiadError`; each front end owns one table from kind to
status. The core never mentions a status code. Nothing here knows a protocol.
"""


class NaiadError(Exception):
    """An error with a kind (its class) and a text that says what failed, where, and what to do.

    `triton_code` is the name of Triton's error code for the kind: it is what `pb_utils.TritonError`
    carries and what a host sends to the server.
    """

    triton_code = "UNKNOWN"
    #: Whether the engine did not take a request, which a front end in another process hears of later.
    refused = False
    #: What to do about it, for the log: clients are told what Triton tells them.
    advice = ""

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else ""


def text_of(error: BaseException) -> str:
    """What an exception says of itself, whatever its class makes of that: always UTF-8, as Triton has it."""
    try:
        text = error.message if isinstance(error, NaiadError) else str(error)
        return text.encode(errors="backslashreplace").decode()
    except BaseException:
        return "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"


class Unknown(NaiadError):
    """A failure that nobody has classified (Triton's UNKNOWN)."""


class InvalidArgument(NaiadError):
    """The request, the configuration or an option is wrong."""

    triton_code = "INVALID_ARG"


class NotFound(NaiadError):
    """A model, version, region or file that is not there."""

    triton_code = "NOT_FOUND"


class Unavailable(NaiadError):
    """There, but not now: loading, unloading, restarting, queue full, shutting down."""

    triton_code = "UNAVAILABLE"


class Unsupported(NaiadError):
    """A known feature that this server, build or model does not offer."""

    triton_code = "UNSUPPORTED"


class AlreadyExists(NaiadError):
    """A name that is taken."""

    triton_code = "ALREADY_EXISTS"


class Cancelled(NaiadError):
    """The client withdrew the request."""

    triton_code = "CANCELLED"


class ResourceExhausted(Unavailable):
    """A limit (arena, queue, memory) does not admit the request."""


class Internal(NaiadError):
    """A model or the server itself failed."""

    triton_code = "INTERNAL"


_BY_TRITON_CODE: dict[str, type[NaiadError]] = {
    kind.triton_code: kind
    for kind in (
        Unknown,
        InvalidArgument,
        NotFound,
        Unavailable,
        Unsupported,
        AlreadyExists,
        Cancelled,
        Internal,
    )
}


def from_triton_code(code: str, message: str) -> NaiadError:
    """The error of a Triton code name, for example `("NOT_FOUND", "no such file")`; unknown codes are Unknown."""
    return _BY_TRITON_CODE.get(code, Unknown)(message)
