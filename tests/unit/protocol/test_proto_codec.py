"""gRPC's inference messages: every form of request and response, and Triton's words for what is wrong."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from naiad.config.model_config import ModelConfig
from naiad.datatypes import LARGE, DataType, TakesLong
from naiad.errors import Internal, InvalidArgument, NaiadError, NotFound, Unsupported
from naiad.messages import InferRequest, InferResponse, SequenceControl, Tensor
from naiad.packed import pack_bytes, unpack_bytes
from naiad.protocol import proto_codec
from naiad.protocol.outputs import OutputSpec
from naiad.protocol.proto_codec import (
    SPLIT_BYTE_SIZE,
    Reply,
    decode,
    encode,
    encode_stream,
    encode_stream_end,
    encode_stream_error,
    parse_request,
    parse_version,
    recall,
    remember,
)
from naiad.protocol.regions import Regions

LOCAL = "ipv4:127.0.0.1:1"


def config(max_batch_size: int = 0) -> ModelConfig:
    proto = model_config_pb2.ModelConfig(name="m", backend="python", max_batch_size=max_batch_size)
    proto.input.add(name="X", data_type="TYPE_INT32", dims=[-1])
    proto.output.add(name="Y", data_type="TYPE_FP32", dims=[-1])
    return ModelConfig(proto)


CONFIG = config()


@pytest.fixture
def regions(tmp_path: Path) -> Regions:
    (tmp_path / "r").write_bytes(bytes(range(64)))
    regions = Regions(directory=str(tmp_path))
    regions.register_system("r", "/r", 0, 64)
    return regions


def message(**fields: Any) -> Any:
    return pb.ModelInferRequest(model_name="m", **fields)


def tensor(name: str = "X", datatype: str = "INT32", shape: tuple[int, ...] = (2,), **fields: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **fields)


def parameter(**choice: Any) -> Any:
    return pb.InferParameter(**choice)


def read(request: Any, regions: Regions | None = None, peer: str = LOCAL) -> tuple[InferRequest, Reply]:
    parsed, raw = parse_request(request.SerializeToString())
    return decode(parsed, raw, CONFIG, regions or Regions(), -1, peer)


def refusal(request: Any, regions: Regions | None = None) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read(request, regions)
    return caught.value.message


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("text", "version"), [("", -1), ("1", 1), ("0", 0), (" 12", 12), ("+3", 3), ("7abc", 7), ("9" * 18, int("9" * 18))]
)
def test_versions_are_read_as_c_reads_numbers(text: str, version: int) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("-1", "invalid model version specified '-1' , version should be an integral value > 0"),
        (
            "last",
            "failed to get model version from specified version string 'last' (details: stol), version should be an "
            "integral value > 0",
        ),
        (
            "\u0661",
            "failed to get model version from specified version string '\u0661' (details: stol), version should be an "
            "integral value > 0",
        ),
        (
            "9" * 20,
            f"failed to get model version from specified version string '{'9' * 20}' (details: stol), version should "
            "be an integral value > 0",
        ),
    ],
)
def test_what_is_no_version(text: str, error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_version(text)
    assert caught.value.message == error


# ---------------------------------------------------------------- requests

VALUES: list[tuple[str, str, list[Any], bytes]] = [
    ("BOOL", "bool_contents", [True, False], b"\1\0"),
    ("INT8", "int_contents", [-128, 127], b"\x80\x7f"),
    ("INT8", "int_contents", [300, -129], b"\x2c\x7f"),
    ("INT16", "int_contents", [-2, 1], np.array([-2, 1], np.int16).tobytes()),
    ("INT32", "int_contents", [-(2**31), 2**31 - 1], np.array([-(2**31), 2**31 - 1], np.int32).tobytes()),
    ("INT64", "int64_contents", [-(2**63), 2**63 - 1], np.array([-(2**63), 2**63 - 1], np.int64).tobytes()),
    ("UINT8", "uint_contents", [0, 255], b"\0\xff"),
    ("UINT16", "uint_contents", [0, 65535], np.array([0, 65535], np.uint16).tobytes()),
    ("UINT32", "uint_contents", [0, 2**32 - 1], np.array([0, 2**32 - 1], np.uint32).tobytes()),
    ("UINT64", "uint64_contents", [0, 2**64 - 1], np.array([0, 2**64 - 1], np.uint64).tobytes()),
    ("FP32", "fp32_contents", [1.5, -0.25], np.array([1.5, -0.25], np.float32).tobytes()),
    ("FP64", "fp64_contents", [1.5, 0.1], np.array([1.5, 0.1]).tobytes()),
    ("BYTES", "bytes_contents", [b"a\0b", b""], b"\3\0\0\0a\0b\0\0\0\0"),
]


@pytest.mark.parametrize(("datatype", "field", "values", "data"), VALUES)
def test_typed_contents_become_the_tensors_bytes(datatype: str, field: str, values: list[Any], data: bytes) -> None:
    contents = pb.InferTensorContents(**{field: values})
    request, _ = read(message(inputs=[tensor(datatype=datatype, contents=contents)]))
    assert request.inputs == (Tensor("X", DataType[datatype], (2,), data),)


@pytest.mark.parametrize("datatype", [datatype.name for datatype in DataType])
def test_empty_contents_are_no_bytes(datatype: str) -> None:
    request, _ = read(message(inputs=[tensor(datatype=datatype, shape=(0,), contents=pb.InferTensorContents())]))
    assert request.inputs[0].data == b""


@pytest.mark.parametrize(
    ("datatype", "field", "named"),
    [
        ("FP16", "fp32_contents", "FP32"),
        ("BF16", "fp32_contents", "FP32"),
        ("INT64", "int_contents", "INT32"),
        ("INT32", "int64_contents", "INT64"),
        ("INT32", "uint_contents", "UINT32"),
        ("FP32", "fp64_contents", "FP64"),
        ("UINT8", "uint64_contents", "UINT64"),
        ("UINT8", "bool_contents", "BOOL"),
        ("nonsense", "int_contents", "INT32"),
        ("", "int_contents", "INT32"),
    ],
)
def test_contents_of_another_type(datatype: str, field: str, named: str) -> None:
    request = message(inputs=[tensor(datatype=datatype, contents=pb.InferTensorContents(**{field: [1]}))])
    expected = datatype if datatype in DataType.__members__ else "<invalid>"
    assert refusal(request) == (
        f"unexpected explicit tensor data for input tensor 'X' for model 'm' of type '{named}', expected datatype "
        f"'{expected}'"
    )


def test_contents_in_two_fields_are_refused() -> None:
    contents = pb.InferTensorContents(int_contents=[1], bytes_contents=[b"x"])
    assert refusal(message(inputs=[tensor(contents=contents)])) == (
        "unexpected explicit tensor data for input tensor 'X' for model 'm', binary data was already supplied."
    )


CONTENTS = pb.InferTensorContents(int_contents=[1, 2])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (message(inputs=[tensor()]), "unable to find data for input tensor 'X' for model 'm' in request."),
        (
            message(inputs=[tensor("A"), tensor("B")], raw_input_contents=[bytes(8)]),
            "unable to find data for input tensor 'B' for model 'm' in request.",
        ),
        (
            message(inputs=[tensor(contents=CONTENTS)], raw_input_contents=[bytes(8)]),
            "contents field must not be specified when using raw_input_contents for 'X' for model 'm'",
        ),
        (
            message(inputs=[tensor(datatype="INT31")], raw_input_contents=[bytes(8)], id="7"),
            "[request id: 7] inference input 'X' data-type is '<invalid>', but model 'm' expects 'INT32'",
        ),
        (
            message(inputs=[tensor(datatype="INT31")], raw_input_contents=[bytes(8)]),
            "[request id: <id_unknown>] inference input 'X' data-type is '<invalid>', but model 'm' expects 'INT32'",
        ),
        (
            message(inputs=[tensor("W", "INT31")], raw_input_contents=[bytes(8)]),
            "unexpected inference input 'W' for model 'm'",
        ),
        (
            message(inputs=[tensor(parameters={"shared_memory_byte_size": parameter(int64_param=4)})]),
            "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'X'",
        ),
        (
            message(inputs=[tensor(parameters={"shared_memory_region": parameter(int64_param=4)})]),
            "invalid value type for 'shared_memory_region' parameter for tensor 'X', expected string_param.",
        ),
        (
            message(inputs=[tensor(parameters={"shared_memory_region": parameter(string_param="r")})]),
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'X'",
        ),
        (
            message(
                inputs=[
                    tensor(
                        parameters={
                            "shared_memory_region": parameter(string_param="r"),
                            "shared_memory_byte_size": parameter(int64_param=4),
                        },
                        contents=CONTENTS,
                    )
                ]
            ),
            "unexpected 'content' provided when using shared memory for input tensor 'X' for model 'm'",
        ),
    ],
)
def test_inputs_that_are_refused(request_: Any, text: str) -> None:
    assert refusal(request_) == text


NOWHERE = {
    "shared_memory_region": parameter(string_param="gone"),
    "shared_memory_byte_size": parameter(int64_param=8),
}
WRONG_OUTPUT = pb.ModelInferRequest.InferRequestedOutputTensor(name="Y", parameters=NOWHERE)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (message(inputs=[tensor(), tensor()], id="7"), "[request id: 7] input 'X' already exists in request"),
        (
            message(inputs=[tensor(parameters=NOWHERE), tensor()], outputs=[WRONG_OUTPUT]),
            "[request id: <id_unknown>] input 'X' already exists in request",
        ),
        (
            message(inputs=[tensor()], outputs=[WRONG_OUTPUT]),
            "unable to find data for input tensor 'X' for model 'm' in request.",
        ),
        (
            message(inputs=[tensor("X", "INT31"), tensor("Z")], raw_input_contents=[bytes(8)]),
            "unable to find data for input tensor 'Z' for model 'm' in request.",
        ),
        (
            message(inputs=[tensor("X", "INT31")], raw_input_contents=[bytes(8)], outputs=[WRONG_OUTPUT]),
            "Unable to find shared memory region: 'gone'",
        ),
    ],
)
def test_which_of_two_errors_is_told(request_: Any, text: str, regions: Regions) -> None:
    with pytest.raises(NaiadError) as caught:
        read(request_, regions)
    assert caught.value.message == text


def test_raw_contents_belong_to_the_inputs_that_are_not_in_regions(regions: Regions) -> None:
    place = {
        "shared_memory_region": parameter(string_param="r"),
        "shared_memory_offset": parameter(int64_param=8),
        "shared_memory_byte_size": parameter(int64_param=4),
    }
    inputs = [tensor("A", shape=(1,)), tensor("B", shape=(1,), parameters=place), tensor("C", shape=(1,))]
    request, _ = read(message(inputs=inputs, raw_input_contents=[b"aaaa", b"cccc"]), regions)
    assert [bytes(each.data) for each in request.inputs] == [b"aaaa", b"\x08\x09\x0a\x0b", b"cccc"]


def test_regions_are_not_for_clients_elsewhere(regions: Regions) -> None:
    place = {
        "shared_memory_region": parameter(string_param="r"),
        "shared_memory_byte_size": parameter(int64_param=4),
    }
    output = pb.ModelInferRequest.InferRequestedOutputTensor(name="Y", parameters=place)
    for request in (message(inputs=[tensor(parameters=place)]), message(outputs=[output])):
        with pytest.raises(Unsupported, match="allow-client-shm=true"):
            read(request, regions, "ipv4:192.0.2.1:1")


def kept(request: Any) -> None:
    data = request.SerializeToString()
    remember(data, *read(request))


def recalled(request: Any) -> tuple[InferRequest, Reply] | None:
    return recall(request.SerializeToString())


@given(
    st.lists(
        st.tuples(st.sampled_from(["INT32", "INT8", "FP64"]), st.lists(st.integers(0, 3), max_size=3), st.binary()),
        max_size=3,
    ),
    st.lists(st.binary(), max_size=3),
)
def test_messages_like_one_before_are_read_as_any_other(inputs: list[tuple[str, list[int], bytes]], more: Any) -> None:
    tensors = [tensor(f"X{i}", datatype, tuple(shape)) for i, (datatype, shape, _) in enumerate(inputs)]
    first = message(inputs=tensors, raw_input_contents=[data for _, _, data in inputs], model_version="1")
    kept(first)
    assert recalled(first) == read(first)
    like = message(inputs=tensors, raw_input_contents=[*more[: len(tensors)], *[b""] * (len(tensors) - len(more))])
    like.model_version = "1"
    again = recalled(like)
    assert again is None or again == read(like)


def test_other_data_around_the_same_message() -> None:
    outputs = [pb.ModelInferRequest.InferRequestedOutputTensor(name="Y")]
    for data in (bytes(8), b"12345678"):
        request = message(inputs=[tensor()], outputs=outputs, raw_input_contents=[data])
        if data == bytes(8):
            kept(request)
        again = recalled(request)
        assert again == read(request)
        assert bytes(again[0].inputs[0].data) == data
    assert recalled(message(inputs=[tensor(shape=(3,))], outputs=outputs, raw_input_contents=[bytes(8)])) is None


def test_the_data_of_a_message_go_with_it() -> None:
    size = 1 << 20
    request = message(inputs=[tensor("L", "INT8", (size,))], raw_input_contents=[bytes(size)])
    data = request.SerializeToString()
    before = sys.getrefcount(data)
    parsed, raw = parse_request(data)
    remember(data, *decode(parsed, raw, CONFIG, Regions()))
    del raw
    assert sys.getrefcount(data) == before
    assert recalled(request) is not None


@pytest.mark.parametrize(
    "request_",
    [
        message(inputs=[tensor()], raw_input_contents=[bytes(8)], id="x"),
        message(inputs=[tensor("S", "BYTES", (1,))], raw_input_contents=[pack_bytes([b"a"])]),
        message(inputs=[tensor("T", contents=pb.InferTensorContents(int_contents=[1, 2]))]),
        message(
            inputs=[tensor("Q")], raw_input_contents=[bytes(8)], parameters={"sequence_id": parameter(int64_param=5)}
        ),
    ],
)
def test_what_differs_from_message_to_message_is_not_kept(request_: Any) -> None:
    kept(request_)
    assert recalled(request_) is None


def test_messages_that_name_regions_are_not_kept(regions: Regions) -> None:
    where = {"shared_memory_region": parameter(string_param="r"), "shared_memory_byte_size": parameter(int64_param=8)}
    request = message(inputs=[tensor(parameters=where)])
    remember(request.SerializeToString(), *read(request, regions))
    assert recalled(request) is None


def test_request_parameters() -> None:
    request, reply = read(
        message(
            id="7",
            parameters={
                "text": parameter(string_param="x"),
                "whole": parameter(int64_param=-5),
                "truth": parameter(bool_param=False),
                "real": parameter(double_param=0.5),
                "sequence_id": parameter(int64_param=9),
                "sequence_end": parameter(bool_param=True),
                "priority": parameter(uint64_param=2),
                "timeout": parameter(int64_param=3000),
                "triton_enable_empty_final_response": parameter(bool_param=True),
            },
        )
    )
    assert request.parameters == {"text": "x", "whole": -5, "truth": False, "real": 0.5}
    assert request.sequence == SequenceControl(9, False, True)
    assert (request.id, request.priority, request.timeout_us) == ("7", 2, 3000)
    assert reply.empty_final


@pytest.mark.parametrize(
    ("parameters", "sequence"),
    [
        ({}, None),
        ({"sequence_id": parameter(int64_param=0)}, None),
        ({"sequence_id": parameter(string_param="abc")}, SequenceControl("abc")),
        ({"sequence_id": parameter(uint64_param=2**64 - 1)}, SequenceControl(2**64 - 1)),
        ({"sequence_id": parameter(int64_param=-1)}, SequenceControl(2**64 - 1)),
        ({"sequence_start": parameter(bool_param=True)}, SequenceControl(0, True)),
    ],
)
def test_sequences(parameters: dict[str, Any], sequence: SequenceControl | None) -> None:
    assert read(message(parameters=parameters))[0].sequence == sequence


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("sequence_id", parameter(bool_param=True), "expected int64_param or string_param."),
        ("sequence_start", parameter(int64_param=1), "expected bool_param."),
        ("sequence_end", parameter(), "expected bool_param."),
        ("priority", parameter(string_param="1"), "expected int64_param or uint64_param."),
        ("timeout", parameter(bool_param=True), "expected int64_param."),
        ("triton_enable_empty_final_response", parameter(int64_param=1), "expected bool_param."),
        ("free", parameter(), "expected int64_param, bool_param, or string_param."),
    ],
)
def test_parameters_of_a_wrong_type(key: str, value: Any, text: str) -> None:
    assert refusal(message(parameters={key: value})) == f"invalid value type for '{key}' parameter, {text}"


def test_parameters_that_are_refused() -> None:
    assert refusal(message(parameters={"triton_x": parameter(bool_param=True)})) == (
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
        "'triton_' are allowed: triton_enable_empty_final_response"
    )
    assert refusal(message(parameters={"priority": parameter(int64_param=-1)})) == (
        "invalid value for 'priority', expected value >= 0."
    )


@pytest.mark.parametrize(
    ("id", "is_taken"), [("x" * 128, True), ("x" * 129, False), ("\xe9" * 64, True), ("\xe9" * 65, False)]
)
def test_correlation_ids_have_128_bytes_at_most(id: str, is_taken: bool) -> None:
    asked = message(parameters={"sequence_id": parameter(string_param=id)})
    if is_taken:
        assert read(asked)[0].sequence == SequenceControl(id)
    else:
        with pytest.raises(Unsupported, match="string correlation ID cannot be longer than 128 characters"):
            read(asked)


def test_a_timeout_has_no_sign() -> None:
    assert read(message(parameters={"timeout": parameter(int64_param=-1)}))[0].timeout_us == 2**64 - 1


def requested(name: str = "Y", **parameters: Any) -> Any:
    return message(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters)])


@pytest.mark.parametrize(("counts", "wanted"), [((2, 0), 2), ((0, 2), 2), ((2, 3), 2)])
def test_of_an_output_asked_for_twice_the_first_wish_counts(counts: Sequence[int], wanted: int) -> None:
    asked = [requested(**({"classification": parameter(int64_param=count)} if count else {})) for count in counts]
    _, reply = read(message(outputs=[output for each in asked for output in each.outputs]))
    assert reply.plan.outputs["Y"].classification == wanted


def test_requested_outputs(regions: Regions) -> None:
    request, reply = read(requested(binary_data=parameter(bool_param=False)))
    assert request.outputs == ("Y",)
    assert reply.plan.outputs == {"Y": OutputSpec("Y", True)}
    _, reply = read(requested(classification=parameter(int64_param=3)))
    assert reply.plan.outputs["Y"].classification == 3
    place = {
        "shared_memory_region": parameter(string_param="r"),
        "shared_memory_offset": parameter(int64_param=8),
        "shared_memory_byte_size": parameter(int64_param=16),
    }
    _, reply = read(requested(**place), regions)
    assert reply.regions["Y"].byte_size == 16
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'ghost'"):
        read(requested(**place | {"shared_memory_region": parameter(string_param="ghost")}), regions)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"classification": parameter(string_param="2")},
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
        (
            {"classification": parameter(int64_param=0)},
            "invalid value for 'classification' parameter, expected >= 0",
        ),
        (
            {
                "classification": parameter(int64_param=2),
                "shared_memory_region": parameter(string_param="r"),
                "shared_memory_byte_size": parameter(int64_param=8),
            },
            "output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            {"shared_memory_offset": parameter(int64_param=2)},
            "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'Y'",
        ),
        (
            {
                "shared_memory_region": parameter(string_param="r"),
                "shared_memory_byte_size": parameter(string_param="2"),
            },
            "invalid value type for 'shared_memory_byte_size' parameter for tensor 'Y', expected int64_param.",
        ),
    ],
)
def test_outputs_that_are_refused(regions: Regions, parameters: dict[str, Any], text: str) -> None:
    assert refusal(requested(**parameters), regions) == text


def test_what_is_no_message() -> None:
    with pytest.raises(Internal, match=r"^Unable to parse request$"):
        parse_request(b"\xff\xff\xff")
    with pytest.raises(Internal, match=r"^Unable to parse request$"):
        parse_request(b"\xff" * SPLIT_BYTE_SIZE)
    # A size that goes on and on is not read to its end, which takes the square of its length.
    with pytest.raises(Internal, match=r"^Unable to parse request$"):
        parse_request(b"\x3a" + b"\xff" * 4_000_000, True)


def test_only_what_is_large_without_its_raw_contents_takes_long() -> None:
    raw = message(inputs=[tensor()], raw_input_contents=[bytes(LARGE)]).SerializeToString()
    assert len(parse_request(raw)[1][0]) == LARGE
    numbers = list(range(-5, LARGE // 2))
    typed = message(inputs=[tensor(shape=[len(numbers)], contents=pb.InferTensorContents(int_contents=numbers))])
    with pytest.raises(TakesLong):
        parse_request(typed.SerializeToString())
    request, _ = decode(*parse_request(typed.SerializeToString(), True), CONFIG, Regions())
    assert request.inputs[0].data == np.array(numbers, np.int32).tobytes()


def test_many_texts_are_packed_as_few_are() -> None:
    texts = [b"x" * (number % 5) for number in range(70_000)]
    contents = pb.InferTensorContents(bytes_contents=texts)
    request, _ = read(message(inputs=[tensor(datatype="BYTES", shape=[len(texts)], contents=contents)]))
    assert request.inputs[0].data == pack_bytes(texts)


def test_classes_of_a_large_output_take_long() -> None:
    _, reply = read(requested(classification=parameter(int64_param=2)))
    values = np.arange(LARGE // 4, dtype=np.float32)
    response = InferResponse("m", 1, "", (Tensor("Y", DataType.FP32, (1, len(values)), values.tobytes()),))
    with pytest.raises(TakesLong):
        encode(response, reply, CONFIG, {})
    answer = pb.ModelInferResponse.FromString(encode(response, reply, CONFIG, {}, b"", True))
    last = len(values) - 1
    assert unpack_bytes(answer.raw_output_contents[0], (2,)).tolist() == [
        b"%d.000000:%d" % (last, last),
        b"%d.000000:%d" % (last - 1, last - 1),
    ]


# ---------------------------------------------------------------- wire format


def test_large_tensors_are_views_of_the_message() -> None:
    data = message(inputs=[tensor()], raw_input_contents=[bytes(SPLIT_BYTE_SIZE), b"small"]).SerializeToString()
    _, raw = parse_request(data)
    assert [isinstance(each, memoryview) and each.obj is data for each in raw] == [True, True]
    assert [len(each) for each in raw] == [SPLIT_BYTE_SIZE, 5]


names = st.text(max_size=5)
requests = st.builds(
    pb.ModelInferRequest,
    model_name=names,
    model_version=names,
    id=names,
    parameters=st.dictionaries(names, st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1))),
    inputs=st.lists(
        st.builds(
            pb.ModelInferRequest.InferInputTensor,
            name=names,
            datatype=st.sampled_from([each.name for each in DataType]),
            shape=st.lists(st.integers(0, 2**40), max_size=3),
        ),
        max_size=3,
    ),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=3),
)


@given(request=requests, unknown=st.booleans())
def test_splitting_loses_nothing(request: Any, unknown: bool) -> None:
    data = request.SerializeToString() + (b"\x98\x06\x01" if unknown else b"")
    split = proto_codec._split(data)
    if unknown:
        assert split is None
        return
    assert split is not None
    rest = pb.ModelInferRequest.FromString(split[0])
    rest.raw_input_contents.extend(bytes(each) for each in split[1])
    assert rest == request


@pytest.mark.parametrize("count", [1, 4, 9, 10, 40])
def test_sizes_that_are_longer_than_need_be_are_read_as_protobuf_reads_them(count: int) -> None:
    data = b"\x3a" + b"\x80" * count + b"\0"
    if count < 10:
        assert proto_codec._split(data) == (b"", [b""])
        assert list(pb.ModelInferRequest.FromString(data).raw_input_contents) == [b""]
    else:
        assert proto_codec._split(data) is None
        with pytest.raises(Internal):
            parse_request(data)


@given(data=st.binary(max_size=80))
def test_splitting_accepts_no_less_than_it_understands(data: bytes) -> None:
    """Whatever the bytes, splitting ends, and what it makes of them is what the protobuf library makes of them."""
    split = proto_codec._split(data)
    try:
        whole = pb.ModelInferRequest.FromString(data)
    except Exception:
        return
    if split is not None:
        rest = pb.ModelInferRequest.FromString(split[0])
        rest.raw_input_contents.extend(bytes(each) for each in split[1])
        assert rest == whole


# ---------------------------------------------------------------- responses

PLAIN = read(message())[1]


def response(*outputs: Tensor, id: str = "", **parameters: Any) -> InferResponse:
    return InferResponse("m", 3, id, outputs, parameters)


def test_a_response() -> None:
    encoded = encode(
        response(
            Tensor("Y", DataType.FP32, (1, 2), np.array([1, 2], np.float32).data),
            Tensor("E", DataType.INT8, (0,), b""),
            Tensor("T", DataType.BYTES, (1,), pack_bytes(["a"])),
            id="7",
            truth=True,
            whole=-1,
            huge=2**64 - 1,
            real=0.5,
            text="x",
        ),
        PLAIN,
        CONFIG,
        {},
    )
    decoded = pb.ModelInferResponse.FromString(encoded)
    assert (decoded.model_name, decoded.model_version, decoded.id) == ("m", "3", "7")
    assert [(each.name, each.datatype, list(each.shape)) for each in decoded.outputs] == [
        ("Y", "FP32", [1, 2]),
        ("E", "INT8", [0]),
        ("T", "BYTES", [1]),
    ]
    assert list(decoded.raw_output_contents) == [np.array([1, 2], np.float32).tobytes(), b"", b"\1\0\0\0a"]
    values = {
        key: getattr(value, str(value.WhichOneof("parameter_choice"))) for key, value in decoded.parameters.items()
    }
    assert values == {"truth": True, "whole": -1, "huge": 2**64 - 1, "real": 0.5, "text": "x"}


@given(
    id=names,
    outputs=st.lists(
        st.builds(
            Tensor,
            name=names,
            datatype=st.sampled_from(DataType),
            shape=st.lists(st.integers(0, 2**62), max_size=4).map(tuple),
            contents=st.binary(max_size=400),
        ),
        max_size=4,
    ),
)
def test_responses_are_what_the_protobuf_library_would_write(id: str, outputs: list[Tensor]) -> None:
    expected = pb.ModelInferResponse(model_name="m", model_version="3", id=id)
    for each in outputs:
        expected.outputs.add(name=each.name, datatype=each.datatype.name, shape=each.shape)
        expected.raw_output_contents.append(each.data)
    assert pb.ModelInferResponse.FromString(encode(response(*outputs, id=id), PLAIN, CONFIG, {})) == expected


@given(size=st.integers(0, 2**63 - 1))
def test_lengths_are_written_as_they_are_read(size: int) -> None:
    encoded = proto_codec._varint(size)
    assert proto_codec._read_varint(encoded, 0) == (size, len(encoded))


def test_the_encoded_heads_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proto_codec, "_HEADS_LIMIT", 3)
    for extent in range(10):
        encode(response(Tensor("Y", DataType.INT8, (extent,), bytes(extent))), PLAIN, CONFIG, {})
        encode(InferResponse("m", extent, "", ()), PLAIN, CONFIG, {})
    assert len(proto_codec._OUTPUT_HEADS) <= 3
    assert len(proto_codec._MODEL_HEADS) <= 3


def test_outputs_in_regions(regions: Regions, tmp_path: Path) -> None:
    place = {
        "shared_memory_region": parameter(string_param="r"),
        "shared_memory_byte_size": parameter(int64_param=4),
    }
    _, reply = read(requested(**place), regions)
    regions.unregister_system("r")
    encoded = encode(response(Tensor("Y", DataType.INT8, (3,), b"abc")), reply, CONFIG, {})
    decoded = pb.ModelInferResponse.FromString(encoded)
    assert (list(decoded.raw_output_contents), list(decoded.outputs[0].shape)) == ([b""], [3])
    assert (tmp_path / "r").read_bytes()[:4] == b"abc\x03"
    with pytest.raises(Internal, match=r"output 'Y' \(4 bytes\) should be at least 5 bytes"):
        encode(response(Tensor("Y", DataType.INT8, (5,), b"abcde")), reply, CONFIG, {})


def test_classified_outputs() -> None:
    _, reply = read(requested(classification=parameter(int64_param=2)))
    scores = np.array([[0.1, 0.7, 0.2]], np.float32)
    encoded = encode(
        response(Tensor("Y", DataType.FP32, (1, 3), scores.data)),
        reply,
        config(max_batch_size=4),
        {"Y": ["cat", "dog"]},
    )
    decoded = pb.ModelInferResponse.FromString(encoded)
    assert (decoded.outputs[0].datatype, list(decoded.outputs[0].shape)) == ("BYTES", [1, 2])
    assert decoded.raw_output_contents[0] == pack_bytes(["0.700000:1:dog", "0.200000:2"])
    half = np.zeros(2, ml_dtypes.bfloat16)
    with pytest.raises(InvalidArgument, match="due to unsupported type 'BF16'"):
        encode(response(Tensor("Y", DataType.BF16, (2,), half.tobytes())), reply, CONFIG, {})


def stream(encoded: bytes) -> Any:
    return pb.ModelStreamInferResponse.FromString(encoded)


@pytest.mark.parametrize("final", [False, True])
def test_responses_in_a_stream_say_whether_they_are_final(final: bool) -> None:
    decoded = stream(encode_stream(response(Tensor("Y", DataType.INT8, (200,), bytes(200))), PLAIN, CONFIG, {}, final))
    assert decoded.error_message == ""
    assert decoded.infer_response.parameters["triton_final_response"] == parameter(bool_param=final)
    assert decoded.infer_response.raw_output_contents[0] == bytes(200)


def test_the_end_of_a_decoupled_call() -> None:
    assert stream(encode_stream_end("m", "7")) == pb.ModelStreamInferResponse(
        infer_response=pb.ModelInferResponse(
            model_name="m", id="7", parameters={"triton_final_response": parameter(bool_param=True)}
        )
    )


def test_errors_in_a_stream() -> None:
    assert stream(encode_stream_error("no", "7")) == pb.ModelStreamInferResponse(
        error_message="no", infer_response=pb.ModelInferResponse(id="7")
    )
    assert stream(encode_stream_error("bäd\ud800", "7", "m", False)) == pb.ModelStreamInferResponse(
        error_message="bäd?",
        infer_response=pb.ModelInferResponse(
            model_name="m", id="7", parameters={"triton_final_response": parameter(bool_param=False)}
        ),
    )
