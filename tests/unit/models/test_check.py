"""Requests against configurations: what passes, and Triton's text for what does not."""

from typing import Any

import pytest

from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.datatypes import LARGE, DataType, TakesLong
from naiad.errors import InvalidArgument
from naiad.messages import InferRequest, Tensor, Unread
from naiad.models.check import BrokenContents, RequestCheck
from naiad.packed import pack_bytes

NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check_of(text: str) -> RequestCheck:
    return RequestCheck(ModelConfig(parse_text(f'name: "m" backend: "python" {text}')))


TWO = """
max_batch_size: {batch}
input [ {{ name: "A" data_type: TYPE_INT32 dims: [ 2 ] }}, {{ name: "B" data_type: TYPE_INT32 dims: [ 2 ] }} ]
output [ {{ name: "O" data_type: TYPE_INT32 dims: [ 2 ] }} ]
"""
ONE = """
max_batch_size: {batch}
input [ {{ name: "A" data_type: {kind} dims: [ {dims} ] {more} }} ]
output [ {{ name: "O" data_type: TYPE_INT32 dims: [ 1 ] }} ]
"""


def one(kind: str = "TYPE_INT32", dims: str = "-1", batch: int = 0, more: str = "") -> RequestCheck:
    return check_of(ONE.format(kind=kind, dims=dims, batch=batch, more=more))


def int32(name: str, *shape: int, size: int | None = None) -> Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return Tensor(name, DataType.INT32, shape, bytes(4 * count if size is None else size))


def request(*inputs: Tensor, **fields: object) -> InferRequest:
    return InferRequest("m", inputs, **fields)  # type: ignore[arg-type]


def test_a_good_request_passes_as_it_is() -> None:
    asked = request(int32("A", 3, 2), int32("B", 3, 2), outputs=("O",))
    assert check_of(TWO.format(batch=4))(asked) == (asked, 3, None)


def test_without_batching_there_is_one_row() -> None:
    asked = request(int32("A", 2), int32("B", 2))
    assert check_of(TWO.format(batch=0))(asked) == (asked, 1, None)


def test_inputs_come_out_in_configured_order() -> None:
    a, b = int32("A", 2), int32("B", 2)
    checked, _, _ = check_of(TWO.format(batch=0))(request(b, a))
    assert checked.inputs == (a, b)


@pytest.mark.parametrize(
    ("check", "inputs", "signature"),
    [
        (one(batch=4), [int32("A", 1, 5)], ((5,),)),
        (one(batch=4, more="allow_ragged_batch: true"), [int32("A", 1, 5)], None),
        (one(dims="3", batch=4), [int32("A", 1, 3)], None),
    ],
    ids=["variable shapes must be equal", "ragged ones need not", "fixed ones always are"],
)
def test_what_may_share_a_batch(check: RequestCheck, inputs: list[Tensor], signature: object) -> None:
    assert check(request(*inputs))[2] == signature


def test_optional_inputs_split_batches() -> None:
    check = check_of(
        """
        max_batch_size: 4
        input [ { name: "A" data_type: TYPE_INT32 dims: [ 2 ] },
                { name: "B" data_type: TYPE_INT32 dims: [ 2 ] optional: true } ]
        output [ { name: "O" data_type: TYPE_INT32 dims: [ 2 ] } ]
        """
    )
    both = check(request(int32("A", 1, 2), int32("B", 1, 2)))[2]
    only = check(request(int32("A", 1, 2)))[2]
    assert both != only


@pytest.mark.parametrize(
    ("batch", "inputs", "text"),
    [
        pytest.param(
            0,
            [int32("A", 2)],
            "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but missing "
            "required input(s) ['B']. Please provide all required input(s).",
            id="missing",
        ),
        pytest.param(
            0,
            [int32("A", 2), int32("B", 2), int32("C", 2)],
            "[request id: <id_unknown>] expected 2 inputs but got 3 inputs for model 'm'. Got input(s) ['C','B','A'], but "
            "missing required input(s) ]. Please provide all required input(s).",
            id="too many",
        ),
        pytest.param(
            0, [int32("A", 2), int32("X", 2)], "unexpected inference input 'X' for model 'm'", id="unknown name"
        ),
        pytest.param(
            0,
            [int32("A", 2), int32("A", 2)],
            "[request id: <id_unknown>] input 'A' already exists in request",
            id="twice",
        ),
        pytest.param(
            0,
            [int32("A", 2), Tensor("B", DataType.FP32, (2,), bytes(8))],
            "[request id: <id_unknown>] inference input 'B' data-type is 'FP32', but model 'm' expects 'INT32'",
            id="data type",
        ),
        pytest.param(
            0,
            [int32("A", 3), int32("B", 2)],
            "[request id: <id_unknown>] unexpected shape for input 'A' for model 'm'. Expected [2], got [3]. ",
            id="shape",
        ),
        pytest.param(
            4,
            [int32("A", 1, 2), int32("B", 1, 3)],
            "[request id: <id_unknown>] unexpected shape for input 'B' for model 'm'. Expected [-1,2], got [1,3]. "
            + NOTE,
            id="shape with batching",
        ),
        pytest.param(
            0,
            [Tensor("A", DataType.INT32, (-1,), b""), int32("B", 2)],
            "[request id: <id_unknown>] All input dimensions should be specified for input 'A' for model 'm', got [-1]",
            id="negative dimension",
        ),
        pytest.param(
            4,
            [int32("A", 2, 2), int32("B", 1, 2)],
            "[request id: <id_unknown>] input 'A' batch size does not match other inputs for 'm'",
            id="batch sizes differ",
        ),
        pytest.param(
            4,
            [int32("A", 5, 2), int32("B", 5, 2)],
            "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'm'",
            id="batch too large",
        ),
        pytest.param(
            4,
            [Tensor("A", DataType.INT32, (), b""), int32("B", 1, 2)],
            "[request id: <id_unknown>] input 'A' has no shape but model requires batch dimension for 'm'",
            id="no batch dimension at all",
        ),
        pytest.param(
            0,
            [int32("A", 2, size=7), int32("B", 2)],
            "[request id: <id_unknown>] input byte size mismatch for input 'A' for model 'm'. Expected 8, got 7",
            id="byte size",
        ),
        pytest.param(
            4,
            [int32("A", 0, 2), int32("B", 0, 2)],
            "[request id: <id_unknown>] input byte size mismatch for input 'B' for model 'm'. Expected 8, got 0",
            id="a batch of none is no batch",
        ),
        pytest.param(
            4,
            [Tensor("A", DataType.INT32, (0, 2), bytes(8)), Tensor("B", DataType.INT32, (0, 2), bytes(8))],
            "[request id: <id_unknown>] inference request batch-size must be >= 1 for 'm'",
            id="nor is one of none with the data of one",
        ),
        pytest.param(
            0,
            [Tensor("A", DataType.INT32, (-4,), b""), int32("B", 2)],
            "[request id: <id_unknown>] unexpected shape for input 'A' for model 'm'. Expected [2], got [-4]. ",
            id="a negative dimension in place of a fixed one",
        ),
        pytest.param(
            0,
            [int32("A", 2, size=7), Tensor("B", DataType.FP32, (2,), bytes(8))],
            "[request id: <id_unknown>] inference input 'B' data-type is 'FP32', but model 'm' expects 'INT32'",
            id="the data type of the last, then the size of the first",
        ),
        pytest.param(
            0,
            [Tensor("A", DataType.FP32, (3,), bytes(8)), int32("B", 2, size=7)],
            "[request id: <id_unknown>] input byte size mismatch for input 'B' for model 'm'. Expected 8, got 7",
            id="the size of the last, then the data type of the first",
        ),
    ],
)
def test_refused(batch: int, inputs: list[Tensor], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_of(TWO.format(batch=batch))(request(*inputs))
    assert caught.value.message == text


def test_errors_name_the_request() -> None:
    with pytest.raises(InvalidArgument, match=r"^\[request id: r7\] "):
        one(dims="2")(request(int32("A", 3), id="r7"))


def test_an_unknown_output_is_found_first() -> None:
    with pytest.raises(InvalidArgument) as caught:
        one(dims="2")(request(outputs=("NO",)))
    assert caught.value.message == "unexpected inference output 'NO' for model 'm'"


def test_an_input_given_twice_is_found_before_that() -> None:
    with pytest.raises(InvalidArgument, match="input 'A' already exists in request"):
        one(dims="2")(request(int32("A", 2), int32("A", 2), outputs=("NO",)))


def test_any_number_of_inputs_is_refused() -> None:
    """A look through all names for each of them would take hours."""
    with pytest.raises(InvalidArgument, match="expected 1 inputs but got 300000 inputs"):
        one(dims="2")(request(*(int32(str(number), 2) for number in range(300_000))))


@pytest.mark.parametrize("shape", [(-2, -2), (2, -2), (-1, 4), (-2, 0)])
@pytest.mark.parametrize("batch", [0, 4])
def test_no_dimension_is_negative(shape: tuple[int, int], batch: int) -> None:
    dims = "-1" if batch else "-1, -1"
    for tensor in (int32("A", *shape, size=16), int32("A", *shape, size=0)):
        with pytest.raises(InvalidArgument):
            one(dims=dims, batch=batch)(request(tensor))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            pack_bytes([b"a"]),
            "[request id: <id_unknown>] expected 2 string elements for inference input 'A' for model 'm', got 1",
        ),
        (
            pack_bytes([b"a", b"b", b"c"]),
            "[request id: <id_unknown>] unexpected number of string elements 3 for inference input 'A' for model 'm', "
            "expecting 2",
        ),
        (
            pack_bytes([b"a", b"b"]) + b"xy",
            "[request id: <id_unknown>] incomplete string length indicator for inference input 'A' for model 'm', "
            "expecting 4 bytes but only 2 bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            b"\x09\0\0\0x",
            "[request id: <id_unknown>] expected 2 string elements for inference input 'A' for model 'm', got 1",
        ),
    ],
)
def test_bytes_contents(data: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        one("TYPE_STRING", "2")(request(Tensor("A", DataType.BYTES, (2,), data)))
    assert caught.value.message == text


def test_an_element_longer_than_its_bytes_is_found_by_the_model() -> None:
    with pytest.raises(BrokenContents, match="expecting string of length 9 but only 1 bytes available"):
        one("TYPE_STRING", "1")(request(Tensor("A", DataType.BYTES, (1,), b"\x09\0\0\0x")))


def test_what_takes_long_to_look_through_is_asked_for_in_a_thread() -> None:
    check = one("TYPE_STRING", "-1")
    count = LARGE // 5 + 1
    asked = request(Tensor("A", DataType.BYTES, (count,), pack_bytes([b"x"] * count)))
    with pytest.raises(TakesLong):
        check(asked)
    assert check(asked, True) == (asked, 1, ((),))
    # Not even read before that, where it lies in memory of the client's.
    nowhere: Any = None
    with pytest.raises(TakesLong):
        check(request(Tensor("A", DataType.BYTES, (count,), Unread(nowhere, 0, LARGE))))
    # What is wrong besides is found at once.
    with pytest.raises(InvalidArgument, match="data-type is 'INT32'"):
        check(request(Tensor("A", DataType.INT32, (count,), asked.inputs[0].data)))


def test_zero_sizes_are_fine_where_the_dimension_varies() -> None:
    asked = request(int32("A", 2, 0))
    assert one(batch=4)(asked)[:2] == (asked, 2)
