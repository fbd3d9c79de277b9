"""Long arrays of numbers in the JSON of requests, read without making a Python object of each. From any thread.

simdjson keeps its memory for the next text: the kernel needs longer to make it anew than the parser to use it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import simdjson

from naiad.datatypes import BY_NAME, Buffer, DataType
from naiad.protocol.json_text import parse

#: Texts from this many bytes on. Shorter ones are read as fast by orjson, and their arrays are used as lists.
_LONG: Final = 8 * 1024
#: `naiad.datatypes` kind of number -> what simdjson calls it, and the dtype of what it returns.
_KINDS: Final[dict[str, tuple[Literal["d", "i", "u"], np.dtype[Any]]]] = {
    "f": ("d", np.dtype(np.float64)),
    "i": ("i", np.dtype(np.int64)),
    "u": ("u", np.dtype(np.uint64)),
}
#: Deeper arrays are left to `parse`, whose callers know the limit.
_DEEPEST: Final = 16
#: Objects with more members are left to it too: simdjson goes through all that come before the one it is asked for.
_MOST_MEMBERS: Final = 16
#: So many strings or booleans may be beside the numbers: orjson reads them as fast.
_MOST_OTHERS: Final = 1024
#: More quotes than around the data of an input, in so many bytes at each quarter, are those of strings.
_SAMPLE: Final = 1024
_MANY_QUOTES: Final = 16

_free: Final[list[simdjson.Parser]] = []


def parse_request(text: Buffer) -> Any:
    """As `parse`, but in a long text the `data` of an input is a flat array of float64, int64 or uint64 (whatever holds
    its `datatype`), where it has numbers of this kind and nothing else. Raises what `parse` raises."""
    document = parse_numbers(text)
    return parse(text) if document is None else document


def parse_numbers(text: Buffer) -> dict[str, Any] | None:
    """What `parse_request` makes of a long text, or None where that is left to `parse`: the text is short, wrong, or of
    another dialect; or most of its data are no numbers."""
    # What begins otherwise may have a byte order mark, which simdjson passes over.
    size = len(text)
    if size < _LONG or text[0] != 0x7B:
        return None
    quarter = size // 4
    if all(bytes(text[at : at + _SAMPLE]).count(b'"') > _MANY_QUOTES for at in (quarter, 2 * quarter, 3 * quarter)):
        return None
    document: dict[str, Any] | None = _parsed(text, _document)
    return document


def parse_array(text: bytes, datatype: DataType) -> Any:
    """The flat array that a JSON array of numbers is, as `parse_request` makes it of data of this type; None where it is
    something else."""
    kind = _KINDS.get(datatype.numpy.kind)
    return None if kind is None or text[0] != 0x5B else _parsed(text, partial(_flat, kind=kind))


def _parsed(text: Buffer, use: Callable[[Any], Any]) -> Any:
    try:
        parser = _free.pop()
    except IndexError:
        parser = simdjson.Parser()
    try:
        return use(parser.parse(text))
    except (ValueError, TypeError, RuntimeError):
        # Another dialect, or wrong: for both there are answers.
        return None
    finally:
        _free.append(parser)


def release() -> None:
    """Gives back the memory that parsers keep."""
    _free.clear()


def _document(document: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in _keys(document):
        if key in values:
            raise ValueError(f"'{key}' twice: simdjson finds the first, orjson the last")
        value = document[key]
        if key == "inputs" and isinstance(value, simdjson.Array):
            values[key] = [_input(item) for item in value]
        else:
            values[key] = _plain(value)
    return values


def _keys(value: Any) -> list[str]:
    if len(value) > _MOST_MEMBERS:
        raise ValueError("many members")
    # Its items would be Python objects of all values.
    return list(value.keys())


def _input(item: Any) -> Any:
    if not isinstance(item, simdjson.Object):
        return _plain(item)
    values = {key: None if key == "data" else _plain(item[key]) for key in _keys(item)}
    if "data" in values:
        values["data"] = _data(item["data"], values.get("datatype"))
    return values


def _data(data: Any, datatype_name: Any) -> Any:
    datatype = BY_NAME.get(datatype_name) if isinstance(datatype_name, str) else None
    kind = None if datatype is None else _KINDS.get(datatype.numpy.kind)
    if not isinstance(data, simdjson.Array):
        return _plain(data)
    if kind is not None:
        return _flat(data, kind)
    if len(data) > _MOST_OTHERS:
        raise ValueError("no numbers")
    return data.as_list()


def _flat(data: Any, kind: tuple[Literal["d", "i", "u"], np.dtype[Any]]) -> Any:
    first = data
    for _ in range(_DEEPEST):
        first = first[0] if len(first) else None
        if not isinstance(first, simdjson.Array):
            code, dtype = kind
            return np.frombuffer(data.as_buffer(of_type=code), dtype)
    raise ValueError("nested too deeply")


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Array):
        return value.as_list()
    return value.as_dict() if isinstance(value, simdjson.Object) else value
