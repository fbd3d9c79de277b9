"""Batches laid out and split again come to the same."""

import os

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.datatypes import DataType
from naiad.errors import Internal
from naiad.instances import arena, layout
from naiad.instances.frames import Details, Output, Source
from naiad.messages import UNREAD_FROM, InferRequest, SequenceControl, Tensor, Unread
from naiad.packed import pack_bytes, unpack_bytes


def requests_of(*input_lists):
    return [InferRequest(model_name="m", inputs=tuple(inputs)) for inputs in input_lists]


def tensor(name, rows, width, seed=0):
    values = (np.arange(rows * width) + seed).astype(np.int32)
    return Tensor(name, DataType.INT32, (rows, width), values.tobytes())


@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    widths=st.lists(st.sampled_from([0, 1, 7, 5000]), min_size=1, max_size=3),
    swap=st.booleans(),
)
def test_what_is_laid_out_can_be_split_again(rows, widths, swap):
    lists = [[tensor(f"I{k}", count, width, seed=i) for k, width in enumerate(widths)] for i, count in enumerate(rows)]
    if swap and len(lists) > 1:
        lists[1].reverse()
    requests = requests_of(*lists)
    laid_out = layout.lay_out(requests)
    view = memoryview(bytearray(laid_out.byte_size))
    laid_out.write(view)
    fd = arena.create("test", max(laid_out.byte_size, 1))
    laid_out.write_file(fd)
    assert bytes(arena.map_shared(fd, max(laid_out.byte_size, 1)))[: len(view)] == view
    assert all(i.offset % arena.ALIGNMENT == 0 for i in laid_out.inputs)
    if sum(rows):
        outputs = [Output(i.name, i.datatype, i.shape, i.offset, i.byte_size, None, None) for i in laid_out.inputs]
        for tensors, mine in zip(layout.split(outputs, rows, view, requests), lists, strict=True):
            assert {(t.name, t.shape, bytes(t.data)) for t in tensors} == {(t.name, t.shape, t.data) for t in mine}
    os.close(fd)


class Bytes:
    """Memory of a client's."""

    def __init__(self, data):
        self.data = data

    def read(self, offset, byte_size):
        return self.data[offset : offset + byte_size]

    def read_into(self, offset, target):
        target[:] = self.data[offset : offset + len(target)]


def test_what_is_unread_is_read_to_where_the_batch_lies():
    shape = (1, UNREAD_FROM)
    parts = [bytes([value]) * UNREAD_FROM for value in (1, 2, 3)]
    contents = [Unread(Bytes(b"--" + parts[0]), 2, UNREAD_FROM), parts[1], Unread(Bytes(parts[2]), 0, UNREAD_FROM)]
    laid_out = layout.lay_out(requests_of(*([Tensor("I", DataType.UINT8, shape, data)] for data in contents)))
    assert laid_out.byte_size == 3 * UNREAD_FROM
    view = memoryview(bytearray(laid_out.byte_size))
    laid_out.write(view)
    assert view == b"".join(parts)
    fd = arena.create("test", laid_out.byte_size)
    laid_out.write_file(fd)
    assert arena.map_shared(fd, laid_out.byte_size) == view
    os.close(fd)


def test_what_lies_in_files_of_clients_is_left_to_the_host():
    shape = (1, UNREAD_FROM)
    own, known = bytes([1]) * UNREAD_FROM, Bytes(bytes([2]) * UNREAD_FROM)
    contents = [
        Unread(known, 0, UNREAD_FROM, 7, 100),
        own,
        Unread(known, 0, UNREAD_FROM),
        Unread(known, 0, UNREAD_FROM, 5, 0),
        Unread(known, 0, UNREAD_FROM, 7, 0),
    ]
    laid_out = layout.lay_out(requests_of(*([Tensor("I", DataType.UINT8, shape, data)] for data in contents)))
    view = memoryview(bytearray(laid_out.byte_size))
    files = layout.Files()
    sources = laid_out.write(view, files)
    assert list(files.descriptors.items()) == [(7, 0), (5, 1)]
    assert files.unread == [contents[0], contents[3], contents[4]]
    assert sources == [
        Source(0, 0, 100, UNREAD_FROM),
        Source(3 * UNREAD_FROM, 1, 0, UNREAD_FROM),
        Source(4 * UNREAD_FROM, 0, 0, UNREAD_FROM),
    ]
    nothing = bytes(UNREAD_FROM)
    assert view == nothing + own + known.data + nothing + nothing
    assert laid_out.write(view) == []
    assert view == known.data + own + 3 * known.data


def test_rows_that_cannot_be_stacked_and_absent_inputs_are_told_request_by_request():
    a, b, c = tensor("A", 1, 2), tensor("A", 1, 3), tensor("B", 1, 1)
    laid_out = layout.lay_out(requests_of([a], [b, c]))
    first, second = laid_out.inputs
    assert (first.name, first.shapes, first.sizes, first.byte_size) == ("A", [(1, 2), (1, 3)], [8, 12], 20)
    assert (second.name, second.shapes, second.sizes, second.byte_size) == ("B", [None, (1, 1)], [0, 4], 4)


def test_strings_are_split_by_their_sizes():
    parts = [pack_bytes([b"a"]), pack_bytes([b"bb", b""])]
    output = Output("O", DataType.BYTES.number, (3, 1), 0, 0, [len(p) for p in parts], b"".join(parts))
    (one,), (two,) = layout.split([output], [1, 2], memoryview(b""), requests_of([], []))
    assert unpack_bytes(one.data, one.shape).tolist() == [[b"a"]]
    assert unpack_bytes(two.data, two.shape).tolist() == [[b"bb"], [b""]]


def test_an_output_outside_of_its_memory_is_refused():
    output = Output("O", DataType.INT8.number, (8,), 4, 8, None, None)
    with pytest.raises(Internal, match="'O' lies outside"):
        layout.split([output], [1], memoryview(bytes(8)), requests_of([]))


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ([("a",)], ("a",)),
        ([("a", "b"), ("a", "b")], ("a", "b")),
        ([()], ()),
        ([("a",), ("b", "a")], ("a", "b")),
        ([("a",), ()], ()),
    ],
)
def test_outputs_somebody_asked_for(asked, names):
    requests = [InferRequest(model_name="m", inputs=(), outputs=outputs) for outputs in asked]
    assert layout.asked_outputs(requests) == names


def test_plain_requests_have_no_details():
    assert layout.details([InferRequest(model_name="m", inputs=())], ()) is None


class Follower:
    """A trace; model code has none of it where `id` is 0."""

    context = None

    def __init__(self, id):
        self.id = id


@pytest.mark.parametrize(("id", "details"), [(0, None), (7, [Details("", (), {}, 0, 0, 0, 0, 7)])])
def test_a_trace_that_model_code_has_none_of_is_no_detail(id, details):
    assert layout.details([InferRequest("m", (), trace=Follower(id))], ()) == details


def test_requests_that_ask_for_the_same_outputs_have_no_details():
    requests = [InferRequest(model_name="m", inputs=(), outputs=("a", "b")) for _ in range(2)]
    assert layout.details(requests, layout.asked_outputs(requests)) is None


def test_requests_that_ask_for_different_outputs_say_so():
    requests = [InferRequest(model_name="m", inputs=(), outputs=outputs) for outputs in (("a",), ("b",))]
    assert [it.outputs for it in layout.details(requests, layout.asked_outputs(requests))] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("start", "end", "flags"), [(False, False, 0), (True, False, 1), (False, True, 2), (True, True, 3)]
)
def test_details_of_a_sequence(start, end, flags):
    request = InferRequest(model_name="m", inputs=(), id="x", sequence=SequenceControl(5, start, end), priority=1)
    assert layout.details([request], ()) == [Details("x", (), {}, 5, flags, 1, 0)]


def test_details_are_texts_that_can_be_sent():
    request = InferRequest(
        "m", (), id="\udcff", parameters={"\udcfe": "ä\udcfd", "n": 1}, sequence=SequenceControl("\udcfc")
    )
    (details,) = layout.details([request], ()) or ()
    assert (details.id, details.parameters, details.correlation_id) == (
        "\ufffd",
        {"\ufffd": "ä\ufffd", "n": 1},
        "\ufffd",
    )
    msgspec.msgpack.encode(details)
