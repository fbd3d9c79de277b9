"""Requests of the generate extension that name a member twice, or nest one that does not fit."""

import pytest

from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.errors import NaiadError
from naiad.protocol.generate_codec import decode_generate

CONFIG = ModelConfig(
    parse_text(
        """
        name: "m" backend: "python"
        input [ { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "B" data_type: TYPE_BOOL dims: [ 1 ] } ]
        """,
        "m",
    )
)
TWICE = "[request id: <id_unknown>] input 'A' already exists in request"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"A": 1, "B": true, "A": 2}', TWICE),
        (b'{"A": 1, "A": 2, "x": null}', TWICE),
        (b'{"id": "7", "A": 1, "A": 2}', "[request id: 7] input 'A' already exists in request"),
        (
            b'{"A": 1, "parameters": 5}',
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        (b'{"A": 1, "A": 1, "parameters": 5}', TWICE),
        (b'{"A": 1, "parameters": {"A": 2}}', f"Converting keyword: 'parameters': {TWICE}"),
        (b'{"parameters": {"A": 2}, "A": 1}', TWICE),
        (b'{"A": 1, "x": 2, "A": 2}\0\0', TWICE),
        (
            b'{"A": 1, "A": ' + b"[" * 1020 + b"]" * 1020 + b"}",
            "JSON nesting depth exceeds maximum allowed limit (100)",
        ),
        (b'{"B": true, "B": {"c": 1}}', "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        (
            b'{"parameters": {"n": {"a": 1}}}',
            "Converting keyword: 'parameters': parameter 'n' has invalid type. "
            "It should be either 'int', 'bool', or 'string'.",
        ),
    ],
)
def test_refused(body: bytes, text: str) -> None:
    with pytest.raises(NaiadError) as caught:
        decode_generate(body, CONFIG)
    assert caught.value.message == text


def test_there_may_be_any_number_of_members() -> None:
    """A look through the text for each of them would take minutes."""
    names = ",".join(f'"{number}": 1' for number in range(100_000))
    request = decode_generate(f'{{"A": 1, "id": "1", {names}, "id": "2"}}'.encode(), CONFIG)
    assert (request.id, len(request.parameters)) == ("1", 100_001)


def test_the_first_of_other_members_counts() -> None:
    request = decode_generate(
        b'{"A": 1, "id": "1", "id": "2", "x": 3, "x": 4, "parameters": {"y": 1}, "parameters": {"z": []}}', CONFIG
    )
    assert (request.id, request.parameters) == ("1", {"id": "1", "x": 3, "y": 1})


def test_an_input_may_be_called_id() -> None:
    text = """
        name: "m" backend: "python"
        input [ { name: "id" data_type: TYPE_STRING dims: [ 1 ] } ]
        output [ { name: "O" data_type: TYPE_INT8 dims: [ 1 ] } ]
    """
    request = decode_generate(b'{"id": "q"}', ModelConfig(parse_text(text, "m")))
    assert (request.id, request.parameters) == ("q", {})
    assert [(tensor.name, tensor.data) for tensor in request.inputs] == [("id", b"\1\0\0\0q")]


def test_quoted_names_in_texts_are_no_members() -> None:
    assert decode_generate(b'{"A": 1, "x": "say \\"A\\""}', CONFIG).parameters == {"x": 'say "A"'}
