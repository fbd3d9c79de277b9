import json
import math
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, NaiadError, Unsupported
from naiad.messages import NO_SEQUENCE, InferResponse, SequenceControl, Tensor
from naiad.packed import pack_bytes, pack_texts
from naiad.protocol.json_arrays import json_data, tensor_data
from naiad.protocol.json_codec import decode_raw_request, decode_request, encode_response, header_length
from naiad.protocol.json_text import dump, members_as_given, parse
from naiad.protocol.outputs import ALL_BINARY, ALL_JSON, OutputPlan, OutputSpec, plan_of


def decode(document: Any, tail: bytes = b"", **more: Any) -> Any:
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    for _ in range(0 if "region" in more else 2):
        # What comes again goes another way, to the same end.
        with suppress(NaiadError):
            decode_request(head + tail, len(head), "m", **more)
    return decode_request(head + tail, len(head), "m", **more)


def encode(*outputs: Tensor, plan: OutputPlan = ALL_JSON, **more: Any) -> tuple[dict[str, str], bytes]:
    response = InferResponse("m", 3, more.pop("id", ""), outputs, more.pop("parameters", {}))
    wishes = plan, more.pop("labels", {}), more.pop("batched", False), more.pop("regions", {})
    headers, body = encode_response(response, *wishes)
    assert encode_response(response, *wishes) == (headers, body)
    return dict(headers), body


def item(datatype: str, data: Any, shape: list[int] | None = None, name: str = "IN") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)] if shape is None else shape, "data": data}


def data_of(datatype: str, data: Any, shape: list[int] | None = None) -> Any:
    request, _ = decode({"inputs": [item(datatype, data, shape)]})
    return request.inputs[0].data


class TestJsonText:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b'{"inputs": [', "Invalid value. at 12"),
            (b"hello", "Invalid value. at 0"),
            (b'{"inputs": [],}', "Missing a name for object member. at 14"),
            (b"{]", "Missing a name for object member. at 1"),
            (b'{"a":1}\x01', "The document root must not be followed by other values. at 7"),
            (b"", "The document is empty. at 0"),
            (b'{"a', "Missing a closing quotation mark in string. at 3"),
            (b'["\xff" x', "Missing a comma or ']' after an array element. at 5"),
            (b'{"a":"\x01"}', "Invalid escape character in string. at 6"),
            (b'\xef\xbb\xbf{"a":}', "Invalid value. at 8"),
        ],
    )
    def test_malformed(self, text: bytes, reason: str) -> None:
        with pytest.raises(Internal) as error:
            parse(text)
        assert error.value.message == f"failed to parse the request JSON buffer: {reason}"

    def test_a_byte_order_mark_is_passed_over(self) -> None:
        assert parse(b'\xef\xbb\xbf{"a":"\xff"}') == {"a": "\udcff"}
        assert members_as_given(b'\xef\xbb\xbf{"a":1,"a":2}', {"a": 2}) == [("a", 1), ("a", 2)]

    def test_bare_numbers(self) -> None:
        values = parse(b"[NaN, Infinity, -Infinity, 1]")
        assert math.isnan(values[0])
        assert values[1:] == [math.inf, -math.inf, 1]
        assert dump({"a": [math.nan, math.inf, -math.inf, "null"]}) == b'{"a":[NaN,Infinity,-Infinity,"null"]}'

    def test_bytes_that_are_not_utf8_survive(self) -> None:
        assert parse(b' {"a":"\xff"}\0\xff') == {"a": "\udcff"}, "the text ends at a zero byte"
        with pytest.raises(Internal, match="failed to parse the request JSON buffer: Expecting value"):
            parse(b'["\xff",Inf]')
        value = parse(b'{"a\xff":["\xfe\xff",123456789012345678901234567890]}')
        assert dump({"x": next(iter(value))}) == b'{"x":"a\xff"}'
        assert dump(value["a\udcff"][:1]) == b'["\xfe\xff"]'

    @pytest.mark.parametrize("text", [b"[" * 1_000_000, b"[NaN," + b"[" * 1_000_000, b'{"a":' * 100_000])
    def test_depth(self, text: bytes) -> None:
        with pytest.raises(NaiadError):
            parse(text)

    @given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(), st.lists))
    def test_reads_what_json_writes(self, value: Any) -> None:
        try:
            text = json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return
        assert parse(text) == value


class TestData:
    @pytest.mark.parametrize(
        ("datatype", "values", "expected"),
        [
            ("INT32", [4294967296, 2, -1], struct.pack("<3i", 0, 2, -1)),
            ("INT16", [40000], struct.pack("<h", -25536)),
            ("INT8", [255, 256], b"\xff\0"),
            ("UINT8", [0, 255, 256, 2**64 - 1], b"\0\xff\0\xff"),
            ("UINT64", [2**64 - 1], b"\xff" * 8),
            ("INT64", [-(2**63), 2**63 - 1], struct.pack("<2q", -(2**63), 2**63 - 1)),
            ("FP32", [1, 0.1, 1e300], struct.pack("<3f", 1, 0.1, math.inf)),
            ("FP64", [1, 0.1], struct.pack("<2d", 1, 0.1)),
            ("BOOL", [True, False], b"\1\0"),
            ("BYTES", ["a", "", "ü"], pack_bytes(["a", "", "ü"])),
            ("BYTES", ["too", "many"], pack_bytes(["too", "many"])),
        ],
    )
    def test_values(self, datatype: str, values: list[Any], expected: bytes) -> None:
        assert data_of(datatype, values) == expected

    def test_many_texts_are_as_few_are(self) -> None:
        texts = ["x" * (number % 3) for number in range(70_000)]
        packed = pack_bytes(texts)
        assert data_of("BYTES", texts) == packed
        assert json_data(Tensor("a", DataType.BYTES, (len(texts),), packed)) == texts

    def test_nested(self) -> None:
        flat = struct.pack("<4i", 1, 2, 3, 4)
        assert data_of("INT32", [[1, 2], [3, 4]], [2, 2]) == flat
        assert data_of("INT32", [[1, 2, 3], [4]], [2, 2]) == flat
        assert data_of("INT32", [1, [2, [3]], 4], [4]) == flat

    @pytest.mark.parametrize("first", ["a", "ü", "\udcff", "x" * 300, "ü" * 300])
    def test_nested_texts(self, first: str) -> None:
        packed = pack_texts([first, "b", "c"])
        assert tensor_data("A", DataType.BYTES, 3, [first, ["b", ["c"]]]) == packed
        assert tensor_data("A", DataType.BYTES, 3, [[first], ["b"], ["c"]]) == packed

    @pytest.mark.parametrize("first", ["a", "ü", "\udcff", "x" * 300, "ü" * 300])
    @pytest.mark.parametrize("other", [1, 1.5, True, None, {}, {"b": 1}, ["b", 1], [{}]])
    def test_texts_beside_something_else(self, first: str, other: Any) -> None:
        with pytest.raises(Internal, match="attempt to access JSON non-string as string"):
            tensor_data("A", DataType.BYTES, 2, [first, other])

    def test_nested_too_deep(self) -> None:
        deep: Any = [1]
        for _ in range(200):
            deep = [deep]
        with pytest.raises(InvalidArgument, match="JSON nesting depth exceeds maximum allowed limit"):
            data_of("INT32", deep, [1])

    @pytest.mark.parametrize(("shape", "data"), [([0], []), ([1, 0], ["ignored"]), ([], [1]), ([0, 3], None)])
    def test_no_elements(self, shape: list[int], data: Any) -> None:
        assert data_of("INT32", data, shape) == b""

    SIGNED = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
    UNSIGNED = "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
    COUNT = "Unable to parse 'data': Shape does not match true shape of 'data' field"

    @pytest.mark.parametrize(
        ("datatype", "data", "shape", "text"),
        [
            ("INT32", ["1"], None, SIGNED),
            ("INT32", [1.5], None, SIGNED),
            ("INT32", [True], None, SIGNED),
            ("INT64", [2**63], None, SIGNED),
            ("UINT8", [-1], None, UNSIGNED),
            ("UINT64", [1.0], None, UNSIGNED),
            ("BOOL", [1], None, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
            ("FP32", ["x"], None, "Unable to parse 'data': attempt to access JSON non-number as double"),
            ("FP32", [True], None, "Unable to parse 'data': attempt to access JSON non-number as double"),
            ("BYTES", [1], None, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
            ("INT32", [1, 2], [3], COUNT),
            ("INT32", [1, 2, 3], [2], COUNT),
            ("INT32", [1, "2"], [3], SIGNED),
            ("INT32", [1, 2**64], [3], SIGNED),
            ("INT32", [1, "2", 3], [1], COUNT),
            ("INT32", {"a": 1}, [1], "Unable to parse 'data': attempt to access JSON non-array as array"),
        ],
    )
    def test_wrong_types(self, datatype: str, data: Any, shape: list[int] | None, text: str) -> None:
        with pytest.raises(Internal) as error:
            data_of(datatype, data, shape)
        assert error.value.message == text

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_binary_only(self, datatype: str) -> None:
        with pytest.raises(InvalidArgument, match=rf"receiving {datatype} data via JSON is not supported"):
            data_of(datatype, [1])

    @given(
        st.sampled_from([x for x in DataType if x.name not in ("BOOL", "BYTES", "FP16", "BF16", "FP32", "FP64")]),
        st.lists(st.integers(0, 2**63 - 1), max_size=20),
    )
    def test_wraps_as_a_cast_does(self, datatype: DataType, values: list[int]) -> None:
        expected = np.array(values, np.uint64).astype(datatype.numpy).tobytes()
        assert data_of(datatype.name, values) == expected


INPUT = item("INT32", [1])


class TestRequest:
    def test_long_correlation_id(self) -> None:
        with pytest.raises(Unsupported, match="string correlation ID cannot be longer than 128 characters"):
            decode({"inputs": [INPUT], "parameters": {"sequence_id": "x" * 129}})

    def test_plain(self) -> None:
        request, plan = decode({"id": "x", "inputs": [INPUT], "color": "red"})
        assert (request.model_name, request.model_version, request.id) == ("m", -1, "x")
        assert (request.outputs, request.parameters, request.sequence) == ((), {}, None)
        assert plan == ALL_JSON

    def test_parameters(self) -> None:
        request, plan = decode(
            {
                "inputs": [INPUT],
                "parameters": {
                    "sequence_id": "s",
                    "sequence_end": True,
                    "priority": 1,
                    "timeout": 2,
                    "binary_data_output": True,
                    "t": "x",
                    "f": 0.5,
                },
            },
            forwarded={"X-Color": "red", "t": "header"},
        )
        assert request.sequence == SequenceControl("s", False, True)
        assert (request.priority, request.timeout_us) == (1, 2)
        assert request.parameters == {"X-Color": "red", "t": "header", "f": 0.5}
        assert plan == ALL_BINARY

    def test_outputs(self) -> None:
        region = {"shared_memory_region": "r", "shared_memory_offset": 8, "shared_memory_byte_size": 16}
        request, plan = decode(
            {
                "inputs": [INPUT],
                "outputs": [
                    {"name": "a"},
                    {"name": "b", "parameters": {"binary_data": True, "classification": 2}},
                    {"name": "c", "parameters": region},
                ],
                "parameters": {"binary_data_output": True},
            }
        )
        assert request.outputs == ("a", "b", "c")
        assert plan.outputs == {
            "a": OutputSpec("a"),
            "b": OutputSpec("b", True, 2),
            "c": OutputSpec("c", region="r", region_offset=8, region_byte_size=16),
        }

    def test_region_input(self) -> None:
        given_part: list[tuple[str, int, int]] = []

        def region(name: str, offset: int, byte_size: int) -> bytes:
            given_part.append((name, offset, byte_size))
            return b"abcd"

        entry = {"name": "IN", "datatype": "INT32", "shape": [1]}
        parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": 8}
        request, _ = decode({"inputs": [entry | {"parameters": parameters}]}, region=region)
        assert request.inputs[0].data == b"abcd"
        assert given_part == [("r", 8, 4)]

    ONE_OF = (
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        "'shared_memory_region' in 'parameters'. "
    )
    MISSING = "attempt to access non-existing object member"

    @pytest.mark.parametrize(
        ("document", "kind", "text"),
        [
            ({"id": "a"}, Internal, f"Unable to parse 'inputs': {MISSING} 'inputs'"),
            ({"inputs": {}}, Internal, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
            ([1], Internal, f"Unable to parse 'inputs': {MISSING} 'inputs'"),
            (
                {"inputs": [INPUT], "id": 7},
                Internal,
                "Unable to parse 'id': attempt to access JSON non-string as string",
            ),
            ({"inputs": [1]}, InvalidArgument, f"{ONE_OF}But no field is set"),
            (
                {"inputs": [{"shape": [1], "datatype": "INT32", "data": [1]}]},
                Internal,
                f"Unable to parse 'name': {MISSING} 'name'",
            ),
            (
                {"inputs": [{"name": "IN", "datatype": "INT32", "data": [1]}]},
                Internal,
                f"Unable to parse 'shape': {MISSING} 'shape'",
            ),
            (
                {"inputs": [{"name": "IN", "shape": [1], "data": [1]}]},
                Internal,
                f"Unable to parse 'datatype': {MISSING} 'datatype'",
            ),
            (
                {"inputs": [INPUT | {"shape": [-1]}]},
                Internal,
                "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
            ),
            (
                {"inputs": [INPUT | {"shape": 4}]},
                Internal,
                "Unable to parse 'shape': attempt to access JSON non-array as array",
            ),
            ({"inputs": [INPUT | {"datatype": "INT33"}]}, InvalidArgument, "invalid datatype for input IN"),
            (
                {"inputs": [INPUT | {"shape": [2**40, 2**40]}]},
                InvalidArgument,
                "invalid shape for input 'IN': shape [1099511627776,1099511627776] causes total element count to exceed "
                "maximum size of 9223372036854775807",
            ),
            (
                {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32"}]},
                InvalidArgument,
                f"{ONE_OF}But no field is set",
            ),
            (
                {"inputs": [INPUT | {"parameters": {"binary_data_size": 4}}]},
                InvalidArgument,
                f"{ONE_OF}But set 'data' 'binary_data_size'",
            ),
            (
                {"inputs": [INPUT], "parameters": [1]},
                Internal,
                "failed to get request params.: attempt to get members for non-object",
            ),
            (
                {"inputs": [INPUT], "parameters": {"a": None}},
                InvalidArgument,
                "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'.",
            ),
            (
                {"inputs": [INPUT], "parameters": {"triton_x": 1}},
                InvalidArgument,
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            ),
            (
                {"inputs": [INPUT], "parameters": {"sequence_id": -1}},
                Internal,
                "Unable to parse 'sequence_id': attempt to access JSON non-string as string",
            ),
            (
                {"inputs": [INPUT], "parameters": {"sequence_start": 1}},
                Internal,
                "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean",
            ),
            (
                {"inputs": [INPUT], "outputs": [{"name": "a", "parameters": {"classification": "2"}}]},
                Internal,
                "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer",
            ),
            (
                {
                    "inputs": [INPUT],
                    "outputs": [{"name": "a", "parameters": {"shared_memory_region": "r", "binary_data": True}}],
                },
                InvalidArgument,
                "Output can't set both 'shared_memory_region' and 'binary_data'",
            ),
            (
                {
                    "inputs": [],
                    "outputs": [{"name": "a", "parameters": {"shared_memory_region": "r", "classification": 0}}],
                },
                InvalidArgument,
                "Output can't set both 'shared_memory_region' and 'classification'",
            ),
        ],
    )
    def test_errors(self, document: Any, kind: type[NaiadError], text: str) -> None:
        with pytest.raises(kind) as error:
            decode(document)
        assert error.value.message == text

    def test_sizes_are_limited(self) -> None:
        with pytest.raises(InvalidArgument, match=r"request JSON size of \d+ bytes exceeds .* of 10 bytes"):
            decode({"inputs": [INPUT]}, max_input_size=10)
        with pytest.raises(InvalidArgument, match=r"JSON input 'IN' has a byte_size \(4000000 bytes\)"):
            decode({"inputs": [INPUT | {"shape": [1000000]}]}, max_input_size=1000)


class TestBinary:
    @given(st.lists(st.binary(max_size=40), max_size=5))
    def test_tail_is_cut_into_inputs(self, parts: list[bytes]) -> None:
        inputs = [
            {"name": f"I{i}", "datatype": "UINT8", "shape": [len(x)], "parameters": {"binary_data_size": len(x)}}
            for i, x in enumerate(parts)
        ]
        request, _ = decode({"inputs": inputs}, b"".join(parts))
        assert [bytes(tensor.data) for tensor in request.inputs] == parts

    @pytest.mark.parametrize(
        ("tail", "text"),
        [
            (b"", "unexpected size for input 'IN', expecting 4 additional bytes for model 'm'"),
            (b"abc", "unexpected size for input 'IN', expecting 1 additional bytes for model 'm'"),
            (b"abcde", "unexpected additional input data for model 'm'"),
        ],
    )
    def test_tail_of_another_size(self, tail: bytes, text: str) -> None:
        entry = {"name": "IN", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}}
        with pytest.raises(InvalidArgument) as error:
            decode({"inputs": [entry]}, tail)
        assert error.value.message == text

    def test_binary_outputs_of_an_ensemble_say_what_others_with_its_parameters_do(self) -> None:
        output = Tensor("OUT", DataType.INT8, (2,), b"\x01\x02")
        plain = encode(output, plan=ALL_BINARY)
        ensemble = [encode(output, plan=ALL_BINARY, parameters=NO_SEQUENCE) for _ in range(2)]
        assert ensemble == [encode(output, plan=ALL_BINARY, parameters=dict(NO_SEQUENCE))] * 2
        assert encode(output, plan=ALL_BINARY) == plain
        head = json.loads(ensemble[0][1][:-2])
        assert head.pop("parameters") == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
        assert head == json.loads(plain[1][:-2])

    @given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=5))
    def test_response(self, parts: list[tuple[bytes, bool]]) -> None:
        outputs = [Tensor(f"O{i}", DataType.UINT8, (len(data),), data) for i, (data, _) in enumerate(parts)]
        plan = plan_of([OutputSpec(f"O{i}", binary) for i, (_, binary) in enumerate(parts)], False)
        headers, body = encode(*outputs, plan=plan)
        tail = b"".join(data for data, binary in parts if binary)
        size = int(headers.get("inference-header-content-length", len(body)))
        assert ("inference-header-content-length" in headers) == (tail != b"")
        assert body[size:] == tail
        for output, (data, binary) in zip(json.loads(body[:size])["outputs"], parts, strict=True):
            if binary:
                assert output["parameters"] == {"binary_data_size": len(data)}
                assert "data" not in output
            else:
                assert bytes(output["data"]) == data

    def test_responses_that_are_alike_say_what_each_is(self) -> None:
        plan = plan_of([OutputSpec("a", True)], False)
        first = Tensor("a", DataType.UINT8, (2,), b"ab")
        for tensor, id in (
            (first, ""),
            (first, ""),
            (Tensor("a", DataType.INT8, (2,), b"cd"), ""),
            (Tensor("a", DataType.UINT8, (1, 2), b"ef"), ""),
            (Tensor("a", DataType.UINT8, (3,), b"ghi"), ""),
            (first, "x"),
            (Tensor("a", DataType.UINT8, (0,), b""), ""),
        ):
            headers, body = encode(tensor, Tensor("b", DataType.UINT8, (1,), b"-"), plan=plan, id=id)
            size = int(headers.get("inference-header-content-length", len(body)))
            described = {"name": "a", "datatype": tensor.datatype.name, "shape": list(tensor.shape)}
            described["parameters"] = {"binary_data_size": len(tensor.data)}
            rest = {"model_name": "m", "model_version": "3", "outputs": [described]}
            assert json.loads(body[:size]) == ({"id": id} if id else {}) | rest
            assert body[size:] == tensor.data
            assert ("inference-header-content-length" in headers) == bool(tensor.data)

    @pytest.mark.parametrize("plan", [ALL_JSON, plan_of([OutputSpec("a"), OutputSpec("c")], True)], ids=["all", "some"])
    @pytest.mark.parametrize("parameters", [{}, NO_SEQUENCE, {"p": 1}], ids=["none", "of ensembles", "some"])
    def test_json_responses_that_are_alike_say_what_each_is(self, plan: OutputPlan, parameters: dict[str, Any]) -> None:
        second = Tensor("b", DataType.BYTES, (1,), pack_bytes(["data"]))
        for tensor, data, id in (
            (Tensor("a", DataType.UINT8, (2,), b"ab"), "[97,98]", ""),
            (Tensor("a", DataType.UINT8, (2,), b"cd"), "[99,100]", "x\u00fc"),
            (Tensor("a", DataType.INT8, (2,), b"cd"), "[99,100]", ""),
            (Tensor("a", DataType.UINT8, (1, 2), b"ef"), "[101,102]", ""),
            (Tensor("a", DataType.FP32, (2,), struct.pack("<2f", 0.1, math.nan)), "[0.10000000149011612,NaN]", ""),
            (Tensor("a", DataType.UINT8, (0,), b""), "[]", ""),
            (Tensor("a", DataType.UINT8, (300,), b"a" * 300), str([97] * 300).replace(" ", ""), ""),
        ):
            headers, body = encode(tensor, second, plan=plan, id=id, parameters=parameters)
            shape = str(list(tensor.shape)).replace(" ", "")
            written = f'{{"name":"a","datatype":"{tensor.datatype.name}","shape":{shape},"data":{data}}}'
            if plan is ALL_JSON:
                written += ',{"name":"b","datatype":"BYTES","shape":[1],"data":["data"]}'
            said = json.dumps(parameters, separators=(",", ":"))
            head = (f'"id":"{id}",' if id else "") + '"model_name":"m","model_version":"3",'
            head += f'"parameters":{said},' if parameters else ""
            assert body.decode() == f'{{{head}"outputs":[{written}]}}'
            assert headers == {"content-type": "application/json"}

    def test_a_response_without_outputs(self) -> None:
        assert encode()[1] == b'{"model_name":"m","model_version":"3","outputs":[]}'

    @given(st.lists(st.text(max_size=10), max_size=10))
    def test_bytes_come_back(self, texts: list[str]) -> None:
        texts = [text for text in texts if text.isprintable()]
        request, _ = decode({"inputs": [item("BYTES", texts)]})
        _, body = encode(request.inputs[0])
        assert json.loads(body)["outputs"][0]["data"] == texts

    @pytest.mark.parametrize(
        ("given_length", "size", "expected"),
        [(None, 10, 10), ("4", 10, 4), ("0", 10, 0), ("ten", 10, 0), ("10", 10, 10), (None, 0, 0)],
    )
    def test_header_length(self, given_length: str | None, size: int, expected: int) -> None:
        assert header_length(given_length, size) == expected

    @pytest.mark.parametrize("given_length", ["11", "-1", "9" * 20, "9" * 5000, "-" + "9" * 5000])
    def test_header_length_out_of_range(self, given_length: str) -> None:
        with pytest.raises(InvalidArgument) as error:
            header_length(given_length, 10)
        assert error.value.message == f"inference header size should be in range (0, 10), got: {given_length}"


class TestRaw:
    @staticmethod
    def config(data_type: str, dims: str, batch: int = 0, inputs: int = 1) -> ModelConfig:
        entries = ", ".join(f'{{ name: "I{i}" data_type: TYPE_{data_type} dims: [ {dims} ] }}' for i in range(inputs))
        return ModelConfig(
            parse_text(
                f'name: "m" backend: "python" max_batch_size: {batch} input [ {entries} ] '
                f'output [ {{ name: "O" data_type: TYPE_FP32 dims: [ 1 ] }} ]'
            )
        )

    @pytest.mark.parametrize(
        ("data_type", "dims", "batch", "body", "shape", "data"),
        [
            ("INT32", "-1", 8, b"a" * 12, (1, 3), b"a" * 12),
            ("INT32", "2, -1", 0, b"a" * 16, (2, 2), b"a" * 16),
            ("INT32", "2", 0, b"a" * 8, (2,), b"a" * 8),
            ("STRING", "1", 4, b"hello", (1, 1), b"\5\0\0\0hello"),
        ],
    )
    def test_deduced(
        self, data_type: str, dims: str, batch: int, body: bytes, shape: tuple[int, ...], data: bytes
    ) -> None:
        request, plan = decode_raw_request(body, self.config(data_type, dims, batch))
        assert (request.inputs[0].name, request.inputs[0].shape, request.inputs[0].data) == ("I0", shape, data)
        assert plan == ALL_BINARY

    @pytest.mark.parametrize(
        ("data_type", "dims", "inputs", "text"),
        [
            (
                "INT32",
                "-1",
                2,
                "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration",
            ),
            (
                "INT32",
                "-1, -1",
                1,
                "The shape of the raw input 'I0' can not be deduced because there are more than one variable-sized "
                "dimension",
            ),
            ("STRING", "-1", 1, "For BYTE datatype raw input 'I0', the model must have input shape [1]"),
            ("INT32", "-1", 1, "input byte size mismatch for input 'raw_input' for model 'm'. Expected 0, got 3"),
            ("INT32", "4", 1, "input byte size mismatch for input 'raw_input' for model 'm'. Expected 16, got 3"),
        ],
    )
    def test_errors(self, data_type: str, dims: str, inputs: int, text: str) -> None:
        with pytest.raises(InvalidArgument) as error:
            decode_raw_request(b"abc", self.config(data_type, dims, 0, inputs))
        assert error.value.message == f"[request id: <id_unknown>] {text}"


class TestResponse:
    def test_fields(self) -> None:
        tensor = Tensor("O", DataType.INT32, (2,), struct.pack("<2i", 1, 2))
        headers, body = encode(tensor, id="x", parameters={"sequence_id": 0, "s": "t"})
        assert headers == {"content-type": "application/json"}
        assert body == (
            b'{"id":"x","model_name":"m","model_version":"3","parameters":{"sequence_id":0,"s":"t"},'
            b'"outputs":[{"name":"O","datatype":"INT32","shape":[2],"data":[1,2]}]}'
        )

    @pytest.mark.parametrize(
        ("datatype", "values", "text"),
        [
            (DataType.FP32, [0.1, 1, 3e38], b"[0.10000000149011612,1.0,3.0000000054977558e+38]"),
            (DataType.FP32, [math.nan, math.inf, -math.inf], b"[NaN,Infinity,-Infinity]"),
            (DataType.FP64, [0.1, 5e-324], b"[0.1,5e-324]"),
            (DataType.BOOL, [True, False], b"[true,false]"),
            (DataType.UINT64, [2**64 - 1], b"[18446744073709551615]"),
            (DataType.INT8, [-128, 127], b"[-128,127]"),
            (DataType.FP32, [], b"[]"),
        ],
    )
    def test_numbers(self, datatype: DataType, values: list[Any], text: bytes) -> None:
        array = np.array(values, datatype.numpy)
        for data in (array.tobytes(), memoryview(array.tobytes()), bytearray(array.tobytes())):
            _, body = encode(Tensor("O", datatype, array.shape, data))
            assert body.endswith(b'"data":' + text + b"}]}")

    @pytest.mark.parametrize("datatype", [DataType.FP32, DataType.INT16, DataType.BOOL, DataType.FP64])
    def test_many_numbers_are_written_as_few_are(self, datatype: DataType) -> None:
        values = (np.arange(2000) % 7 - 3).astype(datatype.numpy) / (3 if datatype in (DataType.FP32,) else 1)
        values = values.astype(datatype.numpy)
        _, body = encode(Tensor("O", datatype, values.shape, values.tobytes()))
        expected = values.astype(float) if datatype is DataType.FP32 else values
        assert json.loads(body)["outputs"][0]["data"] == expected.tolist()
        if datatype is DataType.FP32:
            values[5] = math.nan
            _, body = encode(Tensor("O", datatype, values.shape, values.tobytes()))
            assert b",NaN," in body

    def test_bytes_that_are_not_utf8(self) -> None:
        _, body = encode(Tensor("O", DataType.BYTES, (1,), pack_bytes([b"\xff\xfe"])))
        assert b'"data":["\xff\xfe"]' in body

    def test_malformed_bytes(self) -> None:
        with pytest.raises(Internal, match="malformed BYTES output"):
            encode(Tensor("O", DataType.BYTES, (1,), b"\5\0\0\0a"))

    def test_outputs_not_asked_for_are_left_out(self) -> None:
        tensors = [Tensor(name, DataType.UINT8, (1,), b"a") for name in ("a", "b")]
        _, body = encode(*tensors, plan=OutputPlan({"b": OutputSpec("b")}))
        assert [output["name"] for output in json.loads(body)["outputs"]] == ["b"]

    def test_region(self) -> None:
        written: dict[str, bytes] = {}
        plan = OutputPlan({"a": OutputSpec("a", region="r")})
        regions = {"a": lambda tensor: written.update({tensor.name: bytes(tensor.data)})}
        _, body = encode(Tensor("a", DataType.UINT8, (2,), b"ab"), plan=plan, regions=regions)
        assert written == {"a": b"ab"}
        assert json.loads(body)["outputs"] == [{"name": "a", "datatype": "UINT8", "shape": [2]}]

    def test_classes(self) -> None:
        plan = OutputPlan({"a": OutputSpec("a", True, 1)})
        headers, body = encode(
            Tensor("a", DataType.UINT8, (1, 2), b"\1\2"), plan=plan, labels={"a": ["x", "y"]}, batched=True
        )
        assert body[int(headers["inference-header-content-length"]) :] == pack_bytes(["2:1:y"])


def test_equal_json_before_other_data_is_read_once_and_still_checked() -> None:
    text = (
        b'{"id":"t","parameters":{"p":1},"inputs":[{"name":"A","shape":[2],"datatype":"INT8","parameters":'
        b'{"binary_data_size":2}},{"name":"B","shape":[1],"datatype":"INT8","parameters":{"binary_data_size":1}}]}'
    )
    first, plan = decode_request(text + b"abc", len(text), "templates")
    again, same_plan = decode_request(text + b"xyz", len(text), "templates")
    assert [bytes(item.data) for item in first.inputs] == [b"ab", b"c"]
    assert [bytes(item.data) for item in again.inputs] == [b"xy", b"z"]
    assert (again.id, again.parameters, same_plan) == (first.id, first.parameters, plan)
    with pytest.raises(InvalidArgument, match="unexpected size for input 'B', expecting 1 additional bytes"):
        decode_request(text + b"ab", len(text), "templates")
    with pytest.raises(InvalidArgument, match="unexpected additional input data for model 'templates'"):
        decode_request(text + b"abcd", len(text), "templates")
    with_header, _ = decode_request(text + b"abc", len(text), "templates", forwarded={"X": "y"})
    assert with_header.parameters == {"p": 1, "X": "y"}
