"""Correlation ids that are texts. Pure."""

from naiad.errors import Unsupported

#: Bytes of UTF-8.
_LONGEST = 128


def correlation_text(text: str) -> str:
    """The id, if it is short enough; those that are too long raise Unsupported, as in Triton."""
    if len(text) > _LONGEST or len(text.encode(errors="surrogateescape")) > _LONGEST:
        raise Unsupported(f"string correlation ID cannot be longer than {_LONGEST} characters")
    return text
