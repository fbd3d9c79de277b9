"""Text and JSON forms of a model configuration, to and from the protobuf message.

Knows the syntax only; what a configuration may say is in `validate`. Pure; runs on the loop or in a thread.
"""

import difflib
import re
import struct
from typing import Any

import orjson
from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig as Proto

from naiad.errors import InvalidArgument

#: A model configuration in Triton's JSON form: what `GET /v2/models/M/config` shows.
ConfigDict = dict[str, Any]

_ROOT: Descriptor = Proto.DESCRIPTOR

_POSITION = re.compile(r"^\s*\d+:\d+\s*:\s*")
_NO_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<word>[^"]*)"')
_NO_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<word>[\w-]+)')
_UNEXPECTED = re.compile(r"Expected identifier or number, got (?P<character>.)\.$")
_TWICE = re.compile(r'should not have multiple "(?P<field>\w+)" fields')
_ONEOF = re.compile(r'Field "(?P<second>\w+)" is specified along with field "(?P<first>\w+)"')
#: The field whose value begins at the end of the text, or is a list that has begun there.
_FIELD_BEFORE = re.compile(r"([A-Za-z_]\w*)\s*:\s*(?:\[[^\]{}]*)?$")

#: What other libraries call our data types, where the spelling does not lead there.
_OTHER_NAMES = {
    "TYPE_FLOAT": "TYPE_FP32",
    "TYPE_FLOAT16": "TYPE_FP16",
    "TYPE_FLOAT32": "TYPE_FP32",
    "TYPE_FLOAT64": "TYPE_FP64",
    "TYPE_HALF": "TYPE_FP16",
    "TYPE_DOUBLE": "TYPE_FP64",
    "TYPE_BFLOAT16": "TYPE_BF16",
    "TYPE_INT": "TYPE_INT32",
    "TYPE_LONG": "TYPE_INT64",
    "TYPE_BYTES": "TYPE_STRING",
}

#: What is meant by what no text format of protobuf begins with.
_OTHER_LANGUAGES = {
    "/": "comments begin with '#'",
    "{": "this is protobuf's text format, not JSON",
}

#: With more names than this a list of them hides the problem instead of explaining it.
_LISTED = 16


def parse_text(text: str, source: str = "config.pbtxt") -> Proto:
    """The configuration in `text` (protobuf text format).

    Raises InvalidArgument saying the file (`source`), line, column, field and, where a name is unknown, what was
    probably meant.
    """
    message = Proto()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        place = "" if line is None else f":{line}" if column is None else f":{line}:{column}"
        reason = _reason(str(error), _source_line(text, line), column)
        raise InvalidArgument(f"failed to read text proto from {source}{place}: {reason}") from error
    if problem := _unknown_enum(message):
        raise InvalidArgument(f"failed to read text proto from {source}: {problem}")
    return message


def _unknown_enum(message: Any) -> str | None:
    """Says which field has a number that its enumeration does not know; protobuf lets those pass."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                continue
            items = list(value.values())
        else:
            items = list(value) if field.is_repeated else [value]
        for item in items:
            if field.message_type is not None:
                if problem := _unknown_enum(item):
                    return problem
            elif field.enum_type is not None and item not in field.enum_type.values_by_number:
                return f"field '{field.name}': {field.enum_type.name} has no value {item}"
    return None


def _source_line(text: str, line: int | None) -> str:
    lines = text.split("\n")
    return lines[line - 1] if line is not None and line <= len(lines) else ""


def _reason(text: str, source_line: str, column: int | None) -> str:
    """What protobuf says in `text`, in the words of a configuration, with the field and what was probably meant."""
    text = _POSITION.sub("", text).removeprefix(f"'{source_line}': ")
    if found := _NO_FIELD.search(text):
        kind = found["type"].rpartition(".")[2]
        suggestion = _suggest(found["word"], [field.name for field in _message(found["type"]).fields])
        return f"{kind} has no field '{found['word']}'{suggestion}"
    if found := _TWICE.search(text):
        return f"field '{found['field']}' is given more than once"
    if found := _ONEOF.search(text):
        return f"field '{found['second']}' cannot stand together with '{found['first']}'"
    field = _FIELD_BEFORE.search(source_line[: column - 1] if column else source_line)
    where = f"field '{field[1]}': " if field else ""
    if found := _NO_VALUE.search(text):
        enum = _enum(found["type"])
        suggestion = _suggest(found["word"].upper(), list(enum.values_by_name))
        return f"{where}{enum.name} has no value '{found['word']}'{suggestion}"
    if (found := _UNEXPECTED.search(text)) and found["character"] in _OTHER_LANGUAGES:
        text = f"{text.removesuffix('.')}: {_OTHER_LANGUAGES[found['character']]}"
    return where + text


def _suggest(word: str, names: list[str]) -> str:
    close = [name for name in (_OTHER_NAMES.get(word), _OTHER_NAMES.get(f"TYPE_{word}")) if name in names]
    close += [name for name in names if word and (name.endswith(f"_{word}") or name.startswith(f"{word}_"))]
    close += difflib.get_close_matches(word, names, 1, 0.7)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known are {', '.join(sorted(names))}" if len(names) <= _LISTED else ""


def _message(full_name: str) -> Descriptor:
    return _ROOT.file.pool.FindMessageTypeByName(full_name)


def _enum(full_name: str) -> EnumDescriptor:
    return _ROOT.file.pool.FindEnumTypeByName(full_name)


def parse_json(text: str | bytes) -> Proto:
    """The configuration in `text` (Triton's JSON form). Raises InvalidArgument.

    As Triton does, it forgives trailing commas, single quotes and keys without quotes.
    """
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        try:
            document = orjson.loads(_strict_json(text))
        except ValueError:
            raise InvalidArgument(f"the configuration is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgument(f"the configuration must be a JSON object, got {type(document).__name__}")
    return from_dict(document)


_LOOSE_JSON = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")|'(?P<quoted>(?:[^'\\]|\\.)*)'|(?P<key>[A-Za-z_]\w*)(?=\s*:)|(?P<comma>,)(?=\s*[}\]])""",
    re.DOTALL,
)


def _strict_json(text: str | bytes) -> str:
    """`text` with double quotes around every string and key, and without trailing commas."""

    def strict(found: re.Match[str]) -> str:
        if found["quoted"] is not None:
            inner = re.sub(r"\\.|\"", lambda part: {"\\'": "'", '"': '\\"'}.get(part[0], part[0]), found["quoted"])
            return f'"{inner}"'
        if found["key"] is not None:
            return f'"{found["key"]}"'
        return "" if found["comma"] else found[0]

    return _LOOSE_JSON.sub(strict, text if isinstance(text, str) else text.decode())


def from_dict(document: ConfigDict) -> Proto:
    """The message of a configuration in Triton's JSON form. Raises InvalidArgument.

    64-bit integers may be numbers or strings, enumeration names any case; unknown fields are refused.
    """
    message = Proto()
    try:
        json_format.ParseDict(_canonical(document, _ROOT, ""), message)
    except json_format.ParseError as error:
        raise InvalidArgument(str(error).split("\n", 1)[0]) from error
    if problem := _unknown_enum(message):
        raise InvalidArgument(problem)
    return message


def _canonical(value: Any, kind: Descriptor, path: str) -> Any:
    """`value` in the spelling that protobuf's Python parser insists on; its C++ parser, which Triton has, forgives
    enumeration names in any case, one value for a list of one, and quoted booleans."""
    if not isinstance(value, dict):
        return value
    result: dict[str, Any] = {}
    for key, item in value.items():
        field = kind.fields_by_name.get(key) or kind.fields_by_camelcase_name.get(key)
        where = f"{path}.{key}" if path else str(key)
        if field is None:
            suggestion = _suggest(str(key), [known.name for known in kind.fields])
            raise InvalidArgument(f"{where}: {kind.name} has no field '{key}'{suggestion}")
        result[key] = _canonical_field(item, field, where)
    return result


def _canonical_field(value: Any, field: FieldDescriptor, path: str) -> Any:
    if isinstance(value, list):
        return [_canonical_item(item, field, f"{path}[{index}]") for index, item in enumerate(value)]
    if field.message_type is not None and field.message_type.GetOptions().map_entry and isinstance(value, dict):
        entry = field.message_type.fields_by_name["value"]
        return {key: _canonical_item(item, entry, f"{path}.{key}") for key, item in value.items()}
    item = _canonical_item(value, field, path)
    return [item] if field.is_repeated and item is not None and not isinstance(item, list) else item


def _canonical_item(value: Any, field: FieldDescriptor, path: str) -> Any:
    if field.message_type is not None:
        return _canonical(value, field.message_type, path)
    if field.enum_type is not None and isinstance(value, str):
        name = value.upper().replace("-", "_")
        if name not in field.enum_type.values_by_name:
            suggestion = _suggest(name, list(field.enum_type.values_by_name))
            raise InvalidArgument(f"{path}: {field.enum_type.name} has no value '{value}'{suggestion}")
        return name
    if field.type == FieldDescriptor.TYPE_BOOL and value in ("true", "false"):
        return value == "true"
    return value


_INT64 = frozenset(
    {
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_SFIXED64,
    }
)
_FLOATS = frozenset({FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE})

#: 64-bit fields that Triton leaves as strings, as protobuf's own JSON has them.
_STRINGS = frozenset(
    {
        "inference.ModelSequenceBatching.InitialState.dims",
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
    }
)
#: Fields younger than the Triton release whose answers are the specification: shown when set only.
_SHOWN_WHEN_SET = frozenset({"inference.ModelEnsembling.max_inflight_requests"})


def to_dict(message: Any) -> ConfigDict:
    """Triton's JSON form of a configuration: original names, defaults shown, 64-bit integers as numbers.

    A message field that is not set and the unset members of a oneof do not appear.
    """
    result: ConfigDict = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            result[field.name] = _repeated(value, field)
        elif field.has_presence:
            if message.HasField(field.name):
                result[field.name] = _item(value, field)
        elif value or field.full_name not in _SHOWN_WHEN_SET:
            result[field.name] = _item(value, field)
    return result


def _repeated(value: Any, field: FieldDescriptor) -> Any:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        of_value = entry.fields_by_name["value"]
        return {str(key): _item(value[key], of_value) for key in sorted(value)}
    return [_item(item, field) for item in value]


def _item(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return to_dict(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.type in _INT64 and field.full_name in _STRINGS:
        return str(value)
    if field.type in _FLOATS:
        return _number(value, field)
    return value


def _number(value: float, field: FieldDescriptor) -> float | int | str:
    """A float as protobuf prints it in C++: the shortest digits, no ".0", names for what JSON cannot say."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    if value.is_integer() and abs(value) < 1e15:
        return int(value)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        for digits in range(6, 10):
            short = float(f"{value:.{digits}g}")
            if _as_float32(short) == value:
                return short
    return value


def _as_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
