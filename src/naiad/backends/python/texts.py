"""Texts that model code gives: names, ids, messages. Runs in a host."""


def text(value: object, needs: str) -> str:
    """`value` as a str. Like Triton takes bytes, such as an element of a string tensor, in UTF-8.

    Raises TypeError, which begins with `needs`, for what is no text, and UnicodeDecodeError.
    """
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, bytes | bytearray):
        return value.decode()
    raise TypeError(f"{needs}, got {type(value)}")


def plain(value: str) -> str:
    """The same text, where it is one of a class of its own, like numpy's, which nothing encodes."""
    return str.__str__(value)  # not str(), which is the name of an enum's member
