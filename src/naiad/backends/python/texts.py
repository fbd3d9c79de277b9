"""Texts that model code gives and gets: names, ids, messages, JSON. Runs in a host."""

import json
from typing import Any

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_text(value: Any) -> str:
    """`value` as JSON the way Triton writes it, which models may compare and pass on: `{"é":[1,2]}`."""
    return _encoder.encode(value)


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
