"""The sequence scheduler over fake instances: what they are given, what is counted, and what becomes of the lost."""

import asyncio
import struct

import pytest
from scheduling_fakes import TIMES, FakeInstance, Lease, Meddler, Sink

from naiad import datatypes
from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.datatypes import DataType
from naiad.errors import Cancelled, Internal, InvalidArgument, NaiadError, Unavailable
from naiad.messages import InferRequest, InferResponse, SequenceControl, Tensor
from naiad.packed import unpack_bytes
from naiad.scheduling.controls import Controls, pack_correlation_id, zeros_like
from naiad.scheduling.scheduler import Call
from naiad.scheduling.sequence import SequenceScheduler, slots_for
from naiad.scheduling.slots import Direct, Oldest
from naiad.scheduling.states import States, read_initial_states
from naiad.statistics import ModelStatistics

ALL_CONTROLS = """
    control_input { name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0.5, 2 ] } }
    control_input { name: "E" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ -1, 7 ] } }
    control_input { name: "R" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
    control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }"""


def config(sequence="", max_batch_size=4, idle_us=1_000_000):
    return ModelConfig(
        parse_text(
            f'name: "m" backend: "b" max_batch_size: {max_batch_size} '
            'input { name: "IN" data_type: TYPE_INT8 dims: [ 1 ] } '
            'output { name: "OUT" data_type: TYPE_INT8 dims: [ 1 ] } '
            f"sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {sequence} }}"
        )
    )


class Lab:
    def __init__(self, configuration, instances=1, initial_states=None):
        self.config = configuration
        self.instances = [FakeInstance(f"i{number}") for number in range(instances)]
        self.statistics = ModelStatistics("m", "1")
        self.reported: list[str] = []
        self.warnings: list[str] = []
        self.scheduler = SequenceScheduler(
            configuration,
            self.instances,
            self.statistics,
            initial_states=initial_states or {},
            report=lambda text, error: self.reported.append(text),
            warn=self.warnings.append,
        )

    @property
    def instance(self):
        (instance,) = self.instances
        return instance

    async def settle(self):
        """Lets the decision of this turn happen."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def send(self, key, flags="", value=1, rows=1, sink=None, signature=None, **more):
        shape = (rows, 1) if self.config.batching else (1,)
        request = InferRequest(
            "m",
            (Tensor("IN", DataType.INT8, shape, bytes([value]) * rows),),
            sequence=None if key is None else SequenceControl(key, "s" in flags, "e" in flags),
            **more,
        )
        call = Call(request, rows, signature, sink or Sink(), Lease(self.statistics), self.scheduler)
        self.scheduler.submit(call)
        await self.settle()
        return call


def given(instance, index=0):
    """name -> value of the inputs of one request in a batch."""
    unpack = {
        DataType.INT8: "<b",
        DataType.INT32: "<i",
        DataType.FP32: "<f",
        DataType.BOOL: "<?",
        DataType.UINT64: "<Q",
    }
    return {
        tensor.name: struct.unpack(unpack[tensor.datatype], tensor.data)[0]
        if tensor.datatype in unpack
        else unpack_bytes(tensor.data, (1,))[0]
        for tensor in instance.batch.requests[index].inputs
    }


# -- control inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("s", (2, -1, True)), ("e", (0.5, 7, True)), ("se", (2, 7, True)), ("", (0.5, -1, True))],
)
def test_controls_say_where_in_its_sequence_a_request_is(flags, expected):
    controls = Controls(config(ALL_CONTROLS % "UINT64"))
    start, end, ready, corrid = controls.ready(9, "s" in flags, "e" in flags)
    assert (start.name, end.name, ready.name, corrid.name) == ("S", "E", "R", "C")
    assert (
        struct.unpack("<f", start.data)[0],
        struct.unpack("<i", end.data)[0],
        struct.unpack("<?", ready.data)[0],
    ) == expected
    assert struct.unpack("<Q", corrid.data)[0] == 9
    assert {tensor.shape for tensor in (start, end, ready, corrid)} == {(1, 1)}


def test_controls_without_batching_have_one_dimension():
    assert {tensor.shape for tensor in Controls(config(ALL_CONTROLS % "INT32", 0)).ready(1, True, True)} == {(1,)}


def test_the_controls_of_an_empty_slot_are_all_false():
    start, end, ready, corrid = Controls(config(ALL_CONTROLS % "UINT64")).not_ready()
    assert start.data == struct.pack("<f", 0.5)
    assert end.data == struct.pack("<i", -1)
    assert ready.data == b"\0"
    assert corrid.data == bytes(8)


@pytest.mark.parametrize(
    ("key", "datatype", "expected"),
    [
        (5, "UINT64", struct.pack("<Q", 5)),
        (2**64 - 1, "UINT64", b"\xff" * 8),
        (2**64 - 1, "INT64", struct.pack("<q", -1)),
        (5, "UINT32", struct.pack("<I", 5)),
        (2**32 + 5, "INT32", struct.pack("<i", 5)),
        (5, "BYTES", b"\1\0\0\0005"),
        (0, "BYTES", b"\0\0\0\0"),
        ("abc", "BYTES", b"\3\0\0\0abc"),
        # Recorded: the packed text read as a number.
        ("abc", "UINT64", struct.pack("<Q", 27974191445704707)),
        ("abcdefgh", "UINT64", b"\x08\0\0\0abcd"),
        ("abc", "INT32", struct.pack("<i", 3)),
        # Bytes of a client that are not UTF-8 stay what they are.
        ("\udcff", "BYTES", b"\1\0\0\0\xff"),
        ("\udcff", "UINT32", b"\1\0\0\0"),
    ],
)
def test_correlation_ids_as_elements(key, datatype, expected):
    assert pack_correlation_id(key, datatypes.BY_NAME[datatype]) == expected


@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        (Tensor("x", DataType.INT32, (2,), b"12345678"), bytes(8)),
        (Tensor("x", DataType.BYTES, (1, 2), b"\1\0\0\0a\2\0\0\0bc"), bytes(8)),
    ],
)
def test_zeros_keep_type_and_shape(tensor, data):
    assert zeros_like(tensor) == Tensor("x", tensor.datatype, tensor.shape, data)


@pytest.mark.parametrize(
    ("text", "strategy", "width"),
    [
        ("", Direct(), 4),
        ("direct { max_queue_delay_microseconds: 2 minimum_slot_utilization: 0.5 }", Direct(0.5, 2000), 4),
        ("oldest { max_candidate_sequences: 9 }", Oldest(), 9),
        (
            "oldest { max_candidate_sequences: 3 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 3 }",
            Oldest((2, 4), 3000),
            3,
        ),
    ],
)
def test_slots_as_configured(monkeypatch, text, strategy, width):
    made = {}
    monkeypatch.setattr(
        "naiad.scheduling.sequence.Slots", lambda name, instances, width, **more: made.update(width=width, **more)
    )
    slots_for(config(text), 2)
    assert (made["strategy"], made["width"], made["max_batch_size"]) == (strategy, width, 4)
    assert made["idle_ns"] == 1_000_000_000


# -- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "rows", "message"),
    [
        (1, 2, "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher"),
        (0, 1, "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        ("", 1, "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (None, 1, "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
    ],
)
async def test_requests_without_a_place_in_a_sequence_are_refused(key, rows, message):
    lab = Lab(config())
    with pytest.raises(InvalidArgument) as error:
        await lab.send(key, "s", rows=rows)
    assert error.value.message == message
    assert lab.statistics.pending == 0


async def test_a_round_has_a_row_for_every_slot_and_counts_the_real_ones():
    lab = Lab(config(ALL_CONTROLS % "UINT64"))
    await lab.send(1, "s", value=5)
    lab.instance.answer()
    await lab.send(2, "s", value=6)
    null, real = lab.instance.batch.requests
    assert given(lab.instance, 0) == {"IN": 0, "S": 0.5, "E": -1, "R": False, "C": 0}
    assert given(lab.instance, 1) == {"IN": 6, "S": 2, "E": -1, "R": True, "C": 2}
    assert null.sequence is None
    assert real.sequence == SequenceControl(2, True, False)
    assert lab.instance.batch.rows == [1, 1]
    lab.instance.answer()
    statistics = lab.statistics
    assert (statistics.inference_count, statistics.execution_count) == (2, 2)
    assert sorted(statistics.batches) == [1, 2]
    assert statistics.infer.success.count == 2


async def test_pending_counts_what_waits():
    lab = Lab(config(max_batch_size=0))
    first = await lab.send(1, "s")
    await lab.send(1)
    await lab.send(2, "s")
    assert (lab.statistics.pending, lab.scheduler.pending) == (2, 2)
    lab.instance.answer()
    await lab.settle()
    assert lab.statistics.pending == 1
    assert first.lease.released == 1


async def test_text_ids_with_batching_fail_in_triton_s_words_but_keep_their_sequence():
    lab = Lab(config(ALL_CONTROLS % "STRING"))
    call = await lab.send("a", "s")
    assert lab.instance.batch is None
    assert isinstance(call.sink.only, InvalidArgument)
    assert call.sink.only.message == "unexpected number of string elements 2 for inference input 'C', expecting 1"
    call = await lab.send("a")
    assert isinstance(call.sink.only, InvalidArgument)
    assert "string elements" in call.sink.only.message
    assert lab.statistics.failures["BACKEND"] == 2
    assert lab.statistics.pending == 0


async def test_a_start_over_a_live_sequence_is_warned_of():
    lab = Lab(config())
    await lab.send(5, "s")
    lab.instance.answer()
    await lab.send(5, "s")
    (warning,) = lab.warnings
    assert "model 'm': sequence 5 starts before the one of that correlation id has ended" in warning


async def test_cancelling_what_runs_tells_the_instance_and_keeps_the_sequence():
    lab = Lab(config())
    call = await lab.send(1, "s")
    behind = await lab.send(1)
    call.cancel()
    assert lab.instance.cancelled == [0]
    lab.instance.answer()
    await lab.settle()
    assert len(lab.instance.batch.requests) == 1
    lab.instance.answer()
    assert isinstance(behind.sink.only, InferResponse)


async def test_cancelling_what_waits_cancels_what_is_behind_it():
    lab = Lab(config())
    await lab.send(1, "s")
    waiting = [await lab.send(1), await lab.send(1)]
    waiting[0].cancel()
    assert all(isinstance(call.sink.only, Cancelled) for call in waiting)
    assert lab.statistics.failures["CANCELED"] == 2
    assert lab.statistics.pending == 0
    with pytest.raises(InvalidArgument):
        await lab.send(1)


async def test_a_sink_that_fails_harms_nobody():
    class Broken:
        def send(self, result, final):
            raise OSError("gone")

    lab = Lab(config())
    await lab.send(1, "s", sink=Broken())
    lab.instance.answer()
    assert lab.reported == ["a response of model 'm' could not be passed on"]
    call = await lab.send(1)
    lab.instance.answer()
    assert isinstance(call.sink.only, InferResponse)


async def test_timers_end_what_rests_and_what_waits_too_long():
    lab = Lab(config(max_batch_size=0, idle_us=20_000))
    await lab.send(1, "s")
    late = Sink()
    arrived = asyncio.Event()
    late.send = lambda result, final: (late.results.append(result), arrived.set())
    await lab.send(2, "s", timeout_us=1000, sink=late)
    await asyncio.wait_for(arrived.wait(), 20)
    assert isinstance(late.only, Unavailable)
    assert late.only.message == "timeout of the corresponding sequence has been expired"
    next_one = await lab.send(3, "s")
    lab.instance.executed.clear()
    lab.instance.answer()
    # The first sequence rests; when it has rested enough, the third gets its slot.
    await asyncio.wait_for(lab.instance.executed.wait(), 20)
    assert lab.instance.batch.requests[0].sequence.correlation_id == 3
    assert not next_one.ended


async def test_close_waits_for_what_is_under_way_and_refuses_new_sequences():
    lab = Lab(config())
    await lab.send(1, "s")
    closing = asyncio.ensure_future(lab.scheduler.close())
    await lab.settle()
    with pytest.raises(Unavailable, match="has stopped accepting new inference requests"):
        await lab.send(2, "s")
    last = await lab.send(1, "e")
    lab.instance.answer()
    await lab.settle()
    assert not closing.done()
    lab.instance.answer()
    await asyncio.wait_for(closing, 20)
    assert isinstance(last.sink.only, InferResponse)


@pytest.mark.parametrize(("hold", "backlog", "ready_after"), [("2", "", 2), ("1", "2", 3), ("nonsense", "", 1)])
async def test_the_test_hooks_hold_until_enough_wait(monkeypatch, hold, backlog, ready_after):
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", hold)
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", backlog)
    lab = Lab(config(max_batch_size=1 if backlog else 4))
    for key in range(1, ready_after + 1):
        assert lab.instance.batch is None
        await lab.send(key, "s")
    assert lab.instance.batch is not None


# -- lost instances ------------------------------------------------------------------------------------------------


async def test_a_lost_host_ends_its_sequences_and_they_are_told():
    lab = Lab(config())
    running = await lab.send(1, "s")
    behind = await lab.send(1)
    lab.instance.die()
    await lab.settle()
    assert running.sink.only.message == "host died"
    text = (
        "sequence 1 of model 'm' has ended early: the host process of instance 'i0', which held its state, has ended. "
        "Start the sequence again."
    )
    assert (type(behind.sink.only), behind.sink.only.message) == (Unavailable, text)
    for _ in range(2):
        with pytest.raises(Unavailable) as error:
            await lab.send(1)
        assert error.value.message == text
    again = await lab.send(1, "s")
    assert lab.instance.batch is None
    lab.instance.revive()
    await lab.settle()
    lab.instance.answer()
    assert isinstance(again.sink.only, InferResponse)
    assert lab.statistics.failures["BACKEND"] == 1


async def test_a_loss_nobody_was_inside_of_is_noticed_by_the_next_request():
    lab = Lab(config())
    await lab.send(1, "s")
    lab.instance.answer()
    lab.instance.die()
    lab.instance.is_up = True
    with pytest.raises(Unavailable, match="has ended early"):
        await lab.send(1)


async def test_new_sequences_go_to_instances_that_live():
    lab = Lab(config(max_batch_size=0), instances=2)
    lab.instances[0].die()
    await lab.send(1, "s")
    assert lab.instances[1].batch.requests[0].sequence.correlation_id == 1


async def test_steps_that_are_refused_together_end_once_whichever_client_leaves_then():
    lab = Lab(config(max_batch_size=2))
    lab.instance.is_up = False
    sinks = [Meddler(), Sink(), Meddler(), Sink()]
    calls = [await lab.send(key, "s", sink=sink) for key, sink in zip((1, 2, 3, 4), sinks, strict=True)]
    sinks[0].other, sinks[2].other = calls[1], calls[3]
    lab.instance.failure = "it died too often"
    lab.instance.on_change()
    await lab.settle()
    assert [type(sink.only) for sink in sinks] == [Unavailable] * 4
    assert (lab.statistics.pending, lab.reported) == (0, [])


async def test_without_any_instance_everything_fails():
    lab = Lab(config(max_batch_size=0))
    lab.instance.die()
    lab.instance.failure = "it died too often"
    first, second = await lab.send(1, "s"), await lab.send(2, "s")
    for call in (first, second):
        assert call.sink.only.message == "model 'm' is not available: it died too often"
    assert lab.statistics.pending == 0


async def test_a_model_without_instances_refuses_its_requests():
    lab = Lab(config(), instances=0)
    call = await lab.send(1, "s")
    assert call.sink.only.message == "model 'm' is not available: all its instance groups are passive"


async def test_a_server_that_is_about_to_end_refuses_what_begins_and_waits_for_what_has():
    lab, iterative = Lab(config("direct { }")), Lab(config(f"iterative_sequence: true {START}"))
    texts = [
        (lab, SequenceControl(1, start=True), True),
        (lab, SequenceControl(1, start=True, end=True), True),
        (lab, SequenceControl(1), False),
        (lab, SequenceControl(1, end=True), False),
        (lab, None, False),
        (iterative, None, True),
    ]
    for each, sequence, refused in texts:
        error = each.scheduler.stopped(InferRequest("m", (), id="x", sequence=sequence))
        assert (error is not None) == refused
        if error is not None:
            assert error.message == (
                "Server is stopping, scheduler for model has stopped accepting new inference requests"
            )
    assert lab.scheduler.sequences == 0
    await lab.send(1, "s")
    await lab.send(2, "s")
    assert lab.scheduler.sequences == 2


# -- iterative sequences ---------------------------------------------------------------------------------------------

START = 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'


async def test_an_iterative_request_runs_until_the_model_answers():
    lab = Lab(config(f"iterative_sequence: true {START}"))
    call = await lab.send(None, value=3)
    assert given(lab.instance) == {"IN": 3, "S": 1}
    assert lab.instance.batch.requests[0].sequence == SequenceControl(1, True, False)
    for _ in range(2):
        batch, lab.instance.batch = lab.instance.batch, None
        batch.reschedule(0)
        assert lab.statistics.pending == 1
        batch.complete(TIMES)
        await lab.settle()
        assert given(lab.instance) == {"IN": 3, "S": 0}
        assert lab.instance.batch.requests[0].sequence == SequenceControl(1, False, False)
    # Another one joins with an id of its own.
    await lab.send(None)
    batch, lab.instance.batch = lab.instance.batch, None
    batch.reschedule(0)
    batch.complete(TIMES)
    await lab.settle()
    assert [request.sequence.correlation_id for request in lab.instance.batch.requests] == [1, 2]
    lab.instance.answer()
    assert isinstance(call.sink.only, InferResponse)
    # One execution for each iteration, and an inference for each request in it.
    assert (lab.statistics.inference_count, lab.statistics.execution_count) == (5, 4)
    assert lab.statistics.infer.success.count == 5
    assert lab.statistics.pending == 0


async def test_between_two_iterations_a_request_can_be_cancelled():
    lab = Lab(config(f"iterative_sequence: true {START}"))
    call = await lab.send(None)
    batch, lab.instance.batch = lab.instance.batch, None
    batch.reschedule(0)
    call.cancel()
    batch.complete(TIMES)
    await lab.settle()
    assert isinstance(call.sink.only, Cancelled)
    assert lab.instance.batch is None
    assert lab.statistics.pending == 0


async def test_a_request_cancelled_during_an_iteration_is_not_run_again():
    lab = Lab(config(f"iterative_sequence: true {START}", max_batch_size=1))
    call = await lab.send(None)
    waiting = await lab.send(None)
    call.cancel()
    batch, lab.instance.batch = lab.instance.batch, None
    batch.reschedule(0)
    assert isinstance(call.sink.only, Cancelled)
    batch.complete(TIMES)
    await lab.settle()
    assert [request.sequence.correlation_id for request in lab.instance.batch.requests] == [2]
    lab.instance.answer()
    assert isinstance(waiting.sink.only, InferResponse)
    assert lab.statistics.failures["CANCELED"] == 1


# -- implicit state --------------------------------------------------------------------------------------------------

STATE = """state { input_name: "SI" output_name: "SO" data_type: TYPE_INT8 dims: [ -1 ] }
           state { input_name: "TI" output_name: "OUT" data_type: TYPE_INT8 dims: [ 1 ] }"""


def output(name, *values):
    return Tensor(name, DataType.INT8, (1, len(values)), memoryview(bytearray(values)))


async def test_state_is_kept_per_sequence_and_shown_only_as_an_output():
    lab = Lab(config(f"oldest {{ max_candidate_sequences: 4 }} {STATE}"))
    first = await lab.send(1, "s")
    request = lab.instance.batch.requests[0]
    assert [(t.name, t.shape, bytes(t.data)) for t in request.inputs[1:]] == [
        ("SI", (1, 1), b"\0"),
        ("TI", (1, 1), b"\0"),
    ]
    assert request.outputs == ("OUT", "SO")
    answer = output("SO", 4)
    lab.instance.answer([answer, output("OUT", 5)])
    assert [t.name for t in first.sink.only.outputs] == ["OUT"]
    # The arena is used again: the state must be a copy.
    answer.data[:] = b"\x63"
    await lab.send(2, "s")
    lab.instance.answer()
    await lab.send(1)
    assert [bytes(t.data) for t in lab.instance.batch.requests[0].inputs[1:]] == [b"\4", b"\5"]
    lab.instance.answer(error=Internal("no"))
    # A failed step changes nothing; a start begins with zeros.
    await lab.send(1)
    assert [bytes(t.data) for t in lab.instance.batch.requests[0].inputs[1:]] == [b"\4", b"\5"]
    lab.instance.answer()
    await lab.send(1, "s")
    assert [bytes(t.data) for t in lab.instance.batch.requests[0].inputs[1:]] == [b"\0", b"\0"]


async def test_states_of_different_shapes_do_not_share_a_batch():
    lab = Lab(config(STATE))
    await lab.send(1, "s")
    lab.instance.answer([output("SO", 1, 2)])
    await lab.send(2, "s")
    lab.instance.answer((), [output("SO", 3, 4)])
    blocker = await lab.send(3, "s")
    await lab.send(1)
    await lab.send(2)
    lab.instance.answer()
    assert isinstance(blocker.sink.only, InferResponse)
    await lab.send(3)
    # Rows of 1 and 2 have states of two; that of 3, the initial one, is left for the next round, and empty here.
    shapes = [request.inputs[1].shape for request in lab.instance.batch.requests]
    assert shapes == [(1, 2), (1, 2), (1, 2)]
    lab.instance.answer()
    await lab.settle()
    shapes = [request.inputs[1].shape for request in lab.instance.batch.requests]
    assert shapes == [(1, 1), (1, 1), (1, 1)]
    assert [bytes(request.inputs[1].data) for request in lab.instance.batch.requests] == [b"\0"] * 3


@pytest.mark.parametrize(
    ("requested", "asked"), [((), ("OUT", "SO")), (("OUT",), ("OUT", "SO"))], ids=["everything", "by name"]
)
def test_the_model_is_always_asked_for_the_state(requested, asked):
    assert States(config(STATE), {}).outputs(requested) == asked


FROM_FILE = """state { input_name: "SI" output_name: "SO" data_type: TYPE_%s dims: [ -1 ]
    initial_state { name: "n" data_type: TYPE_%s dims: [ 2 ] data_file: "f" } }"""


@pytest.mark.parametrize(
    ("datatype", "data", "kept"),
    [("INT8", b"\1\2\3", b"\1\2"), ("STRING", b"\0\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0")],
)
def test_initial_state_from_a_file(tmp_path, datatype, data, kept):
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(data)
    configuration = config(FROM_FILE % (datatype, datatype))
    contents = read_initial_states(tmp_path, configuration)
    (tensor,) = States(configuration, contents).initial
    assert (tensor.name, tensor.shape, tensor.data) == ("SI", (1, 2), kept)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1", r"initial_state setting expects 2 bytes, but the data provided from fonly has 1 bytes\.$"),
        (None, "failed to open text file for read .*/initial_state/f: No such file or directory"),
    ],
)
def test_an_initial_state_that_is_too_short_or_not_there(tmp_path, data, message):
    if data is not None:
        (tmp_path / "initial_state").mkdir()
        (tmp_path / "initial_state" / "f").write_bytes(data)
    with pytest.raises(NaiadError, match=message):
        read_initial_states(tmp_path, config(FROM_FILE % ("INT8", "INT8")))


# -- instances that come and go ------------------------------------------------------------------------------------


async def test_a_retired_instance_keeps_its_sequences_and_gets_no_other():
    lab = Lab(config(), instances=1)
    old, new = lab.instance, FakeInstance("new")
    await lab.send(1, "s")
    lab.scheduler.add(new)
    gone = lab.scheduler.retire(old)
    old.answer()
    await lab.send(2, "s")
    assert old.batch is None
    assert len(new.batch.requests) == 1
    await lab.send(1, "e")
    assert not gone.is_set()
    old.answer()
    await lab.settle()
    assert gone.is_set()
    new.answer()
    await lab.scheduler.close()


async def test_a_retired_instance_that_is_lost_is_gone():
    lab = Lab(config(), instances=2)
    await lab.send(1, "s")
    gone = lab.scheduler.retire(lab.instances[0])
    lab.instances[0].die()
    await lab.settle()
    assert gone.is_set()
    with pytest.raises(Unavailable, match="has ended early"):
        await lab.send(1, "e")
    lab.instances[0].revive()
    await lab.send(1, "s")
    assert lab.instances[0].batch is None
    assert lab.instances[1].batch is not None


async def test_a_retired_instance_that_is_lost_during_its_last_request_is_gone():
    lab = Lab(config(), instances=2)
    await lab.send(1, "se")
    gone = lab.scheduler.retire(lab.instances[0])
    lab.instances[0].die()
    call = await lab.send(2, "se")
    assert gone.is_set()
    lab.instances[1].answer()
    assert isinstance(call.sink.only, InferResponse)


async def test_an_instance_without_sequences_is_gone_at_once_and_the_backlog_goes_to_new_ones():
    lab = Lab(config(max_batch_size=1), instances=2)
    assert lab.scheduler.retire(lab.instances[1]).is_set()
    await lab.send(1, "s")
    waiting = await lab.send(2, "se")
    new = FakeInstance("new")
    lab.scheduler.add(new)
    await lab.settle()
    assert lab.instances[1].batch is None
    new.answer()
    assert waiting.ended
