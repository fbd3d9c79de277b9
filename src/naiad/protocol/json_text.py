"""JSON as Triton reads and writes it: its dialect, its limits, its error texts. Pure.

orjson does the work. What it refuses is read by RapidJSON, the library Triton uses: bare NaN and Infinity, strings that
are not UTF-8, and everything that is wrong, since the reason and the offset in the error text are RapidJSON's.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
import rapidjson

from naiad.datatypes import Buffer
from naiad.errors import Internal, InvalidArgument, NaiadError

_DEEPEST: Final = 1000
#: Looking through a text for each member's name is faster than reading it again, where there are not more of them.
_FEW_MEMBERS: Final = 64
#: Texts from this many bytes on, and the letters one has where it is mostly numbers.
_LONG: Final = 16 * 1024
_FEW_LETTERS: Final = 256
_TOKENS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
_REASON: Final = re.compile(r"Parse error at offset (\d+): (.*)", re.DOTALL)
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CONTROL_NOW: Final = "Invalid encoding in string."
_CONTROL: Final = "Invalid escape character in string."
_NUMBERS: Final = rapidjson.NM_NATIVE | rapidjson.NM_NAN


def parse(text: Buffer) -> Any:
    """The value of a JSON text. Raises Internal with Triton's text where it is malformed.

    Bytes that are not UTF-8 come out as lone surrogates ("surrogateescape"); `encode` turns them back.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _parse_slowly(bytes(text))


def _parse_slowly(text: bytes) -> Any:
    if text.startswith(_BYTE_ORDER_MARK):
        # Triton passes over it; offsets stay.
        text = b"   " + text[3:]
    # RapidJSON recurses without a limit: what is too deep must not get there, it would end the process.
    if text.count(b"[") + text.count(b"{") > _DEEPEST and _depth(text) > _DEEPEST:
        raise too_deep()
    try:
        return rapidjson.loads(text, number_mode=_NUMBERS)
    except rapidjson.JSONDecodeError as error:
        raise _malformed(error) from None
    except UnicodeDecodeError:
        pass
    try:
        # As many bytes as before, so that offsets stay; only good for finding out whether the rest is right.
        rapidjson.loads(_with_ascii_only(text), number_mode=_NUMBERS)
    except rapidjson.JSONDecodeError as error:
        raise _malformed(error) from None
    return _read_any_bytes(text, _LENIENT)


def _read_any_bytes(text: bytes, decoder: json.JSONDecoder) -> Any:
    try:
        # Like RapidJSON's, the text ends at a zero byte outside of strings.
        value, _ = decoder.raw_decode(text.decode("utf-8", "surrogateescape").lstrip("\ufeff \t\r\n"))
    except RecursionError:
        raise too_deep() from None
    except ValueError as error:
        raise Internal(f"failed to parse the request JSON buffer: {error}") from None
    return value


def _integer(text: str) -> int | float:
    value = int(text)
    return value if -(2**63) <= value < 2**64 else float(text)


_LENIENT: Final = json.JSONDecoder(parse_int=_integer)


def _with_ascii_only(text: bytes) -> bytes:
    return text.decode("ascii", "replace").replace("\ufffd", "?").encode()


def _depth(text: bytes) -> int:
    depth = deepest = 0
    for match in _TOKENS.finditer(text):
        token = text[match.start()]
        if token == 0x5B or token == 0x7B:
            depth += 1
            deepest = max(deepest, depth)
            if deepest > _DEEPEST:
                break
        elif token != 0x22:
            depth -= 1
    return deepest


def _malformed(error: rapidjson.JSONDecodeError) -> NaiadError:
    match = _REASON.match(str(error))
    # Triton's RapidJSON is older and has no word of its own for control characters.
    reason = f"{match[2].replace(_CONTROL_NOW, _CONTROL)} at {match[1]}" if match else str(error)
    return Internal(f"failed to parse the request JSON buffer: {reason}")


def too_deep() -> NaiadError:
    return InvalidArgument("JSON nesting depth exceeds maximum allowed limit (100)")


def dump(value: Any) -> bytes:
    """The JSON text of a value; numpy arrays are lists, NaN and infinities are bare, lone surrogates are raw bytes."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # A string that is not UTF-8.
        return encode(json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")))
    # NaN and infinities become null, which nothing here writes otherwise; the word in a string does no harm.
    if _has_null(text):
        return encode(json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")))
    return text


def _has_null(text: bytes) -> bool:
    """Whether the word is in a text. A long one is mostly numbers: to look for one byte takes a twentieth of the time."""
    if len(text) < _LONG:
        return text.find(b"null") >= 0
    at = -1
    for _ in range(_FEW_LETTERS):
        at = text.find(b"n", at + 1)
        if at < 0:
            return False
        if text.startswith(b"null", at):
            return True
    return text.find(b"null", at + 1) >= 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def encode(text: str) -> bytes:
    """UTF-8, with the bytes that were not UTF-8 when they were read as they were."""
    return text.encode("utf-8", "surrogateescape")


def error_document(message: str) -> bytes:
    return dump({"error": message})


_IS_STRING: Final = "attempt to access JSON non-string as string"
_IS_ARRAY: Final = "attempt to access JSON non-array as array"
IS_BOOLEAN: Final = "attempt to access JSON non-boolean as boolean"
IS_UNSIGNED: Final = "attempt to access JSON non-unsigned-integer as unsigned-integer"
IS_SIGNED: Final = "attempt to access JSON non-signed-integer as signed-integer"
IS_NUMBER: Final = "attempt to access JSON non-number as double"
NO_OBJECT: Final = "attempt to get members for non-object"


def string_member(value: Any, key: str, lead: str = "") -> str:
    """A member that must be there and be a string; `lead` begins the error text."""
    member = _member(value, key, lead)
    if type(member) is not str:
        raise Internal(f"{lead}{_IS_STRING}")
    return member


def array_member(value: Any, key: str, lead: str = "") -> list[Any]:
    member = _member(value, key, lead)
    if type(member) is not list:
        raise Internal(f"{lead}{_IS_ARRAY}")
    return member


def unsigned_member(value: Any, key: str, lead: str = "") -> int:
    member = _member(value, key, lead)
    if type(member) is not int or member < 0:
        raise Internal(f"{lead}{IS_UNSIGNED}")
    return member


def boolean_member(value: Any, key: str, lead: str = "") -> bool:
    member = _member(value, key, lead)
    if type(member) is not bool:
        raise Internal(f"{lead}{IS_BOOLEAN}")
    return member


def members(value: Any, lead: str = "") -> Mapping[str, Any]:
    if type(value) is not dict:
        raise Internal(f"{lead}{NO_OBJECT}")
    return value


def members_as_given(text: bytes, document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The members of `document`, in order, and also those of its text that have the name of another one.

    Raises Internal, or InvalidArgument for what is nested too deeply, where only `parse` could read the text.
    """
    if len(document) <= _FEW_MEMBERS and all(
        text.count(f'"{key}"'.encode("utf-8", "surrogateescape")) < 2 for key in document
    ):
        return list(document.items())
    outermost: list[tuple[str, Any]] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        outermost[:] = pairs  # the outermost object is the last to be complete
        return dict(reversed(pairs))

    _read_any_bytes(text, json.JSONDecoder(parse_int=_integer, object_pairs_hook=note))
    return outermost


def _member(value: Any, key: str, lead: str) -> Any:
    if type(value) is not dict or key not in value:
        raise Internal(f"{lead}attempt to access non-existing object member '{key}'")
    return value[key]
