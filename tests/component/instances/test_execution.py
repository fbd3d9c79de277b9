"""Batches through real host processes, and through threads: the same answers."""

import asyncio
import os
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from instance_lab import Batch, available, config, parameters, request, run, tensor, until

from naiad.backends.api import InstanceContext
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from naiad.instances.busy_poll import AwakeLoop
from naiad.instances.hosts import Limits
from naiad.messages import Destination, SequenceControl, Unread


async def test_a_request_comes_back_with_its_id_and_times_in_order(both):
    model = await both.load("Identity", config())
    (instance,) = model.instances
    batch = Batch(request(np.arange(16, dtype=np.float32), id="7"))
    instance.execute(batch)
    assert not instance.is_available
    [[response]] = await batch.ended()
    assert instance.is_available
    assert response.outputs["OUTPUT0"].tolist() == list(range(16))
    assert response.id == "7"
    times = batch.completions[0]
    assert 0 < times.start_ns <= times.input_end_ns <= times.output_start_ns <= times.end_ns


@pytest.mark.parametrize("datatype", DataType)
async def test_every_data_type_comes_back(both, datatype):
    model = await both.load("Identity", config(datatype.name, [2, -1]))
    if datatype is DataType.BYTES:
        value = np.array([[b"a", b""], [b"\xff" * 300, "ü".encode()]], object)
    else:
        value = np.array([[0, 1], [1, 0]]).astype(datatype.numpy)
    [[response]] = await run(model.instances[0], request(tensor("INPUT0", value, datatype)), rows=[1])
    assert response.outputs["OUTPUT0"].tolist() == value.tolist()


async def test_rows_of_a_batch_are_stacked_and_split_again(both):
    model = await both.load("Identity", config(dims=[3], count=2, max_batch_size=8))
    requests = [
        request(np.full((rows, 3), rows, np.float32), np.full((rows, 3), -rows, np.float32)) for rows in (2, 1, 4)
    ]
    results = await run(model.instances[0], *requests)
    for rows, [response] in zip((2, 1, 4), results, strict=True):
        assert response.outputs["OUTPUT0"].tolist() == [[rows] * 3] * rows
        assert response.outputs["OUTPUT1"].tolist() == [[-rows] * 3] * rows


async def test_strings_of_a_batch_are_stacked_and_split_again(both):
    model = await both.load("Identity", config("BYTES", dims=[2], max_batch_size=8))
    values = [np.array([[b"a", b"bb"]], object), np.array([[b"", b"c" * 500], [b"d", b"e"]], object)]
    results = await run(model.instances[0], *map(request, values))
    assert [response.outputs["OUTPUT0"].tolist() for [response] in results] == [value.tolist() for value in values]


async def test_requests_may_name_their_inputs_in_any_order(both):
    model = await both.load("Identity", config(dims=[1], count=2, max_batch_size=8))
    a, b = tensor("INPUT0", np.float32([[1]])), tensor("INPUT1", np.float32([[2]]))
    results = await run(model.instances[0], request(a, b), request(b, a))
    assert [(r.outputs["OUTPUT0"].item(), r.outputs["OUTPUT1"].item()) for [r] in results] == [(1, 2), (1, 2)]


async def test_only_outputs_asked_for_are_answered(both):
    model = await both.load("Identity", config(dims=[1], count=2, max_batch_size=8))
    values = np.float32([[1]]), np.float32([[2]])
    results = await run(model.instances[0], request(*values, outputs=("OUTPUT1",)), request(*values))
    assert [sorted(r.outputs) for [r] in results] == [["OUTPUT1"], ["OUTPUT0", "OUTPUT1"]]
    [[response]] = await run(model.instances[0], request(*values, outputs=("OUTPUT0",)))
    assert list(response.outputs) == ["OUTPUT0"]


async def test_empty_tensors_and_scalars_of_rows(both):
    model = await both.load("Identity", config(max_batch_size=8))
    results = await run(model.instances[0], *[request(np.zeros((2, 0), np.float32))] * 2)
    assert [r.outputs["OUTPUT0"].shape for [r] in results] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("size", [16, 100_000, 5_000_000, 40_000_000])
async def test_sizes_below_and_above_the_arenas(make_lab, size):
    for isolation in "model", "none":
        async with make_lab(isolation=isolation, limits=Limits(arena=2**20)) as lab:
            for backend in "Identity", "Echo":
                model = await lab.load(backend, config("UINT8", max_batch_size=8), name=backend)
                value = np.arange(size, dtype=np.uint32).astype(np.uint8)
                for _ in range(2):
                    results = await run(model.instances[0], request(value[None]), request(value[None, ::-1]))
                    assert (results[0][0].outputs["OUTPUT0"] == value).all()
                    assert (results[1][0].outputs["OUTPUT0"] == value[::-1]).all()


class ClientMemory:
    """A file that a client wants an output in."""

    def __init__(self, path, size):
        path.write_bytes(bytes(size))
        self.file = path.open("r+b")
        self.reads = 0
        self.destination = Destination(self, 0, self.file.fileno(), 0, size)

    def read(self, offset, byte_size):
        self.reads += 1
        return os.pread(self.file.fileno(), byte_size, offset)


@pytest.mark.parametrize("size", [100_000, 5_000_000, 40_000_000])
async def test_hosts_write_outputs_where_clients_want_them(make_lab, tmp_path, size):
    async with make_lab(limits=Limits(arena=2**20)) as lab:
        for backend in "Identity", "Returning":
            model = await lab.load(backend, config("UINT8", max_batch_size=8), name=backend)
            for turn in range(3):
                memory = ClientMemory(tmp_path / "memory", size)
                asked = request(np.full((1, size), turn + 1, np.uint8))
                asked.destinations = {"OUTPUT0": memory.destination}
                batch = Written(asked)
                model.instances[0].execute(batch)
                await batch.ended()
                with memory.file as file:
                    written = np.frombuffer(file.read(), np.uint8)
                assert batch.written
                assert memory.reads == 0
                assert (written == turn + 1).all()


class Written(Batch):
    """Whose output may have been written where it was wanted."""

    def deliver(self, index, result, final):
        self.written = isinstance(result.outputs[0].contents, Unread)
        super().deliver(index, None, final)


@pytest.mark.parametrize("size", [16, 100_000])
async def test_inputs_that_model_code_keeps_stay_as_they_were(both, size):
    model = await both.load("Remembering", config("UINT8", max_batch_size=8))
    answers = []
    for value in range(5):
        [[response]] = await run(model.instances[0], request(np.full((1, size), value, np.uint8)))
        output = response.outputs["OUTPUT0"]
        assert output.shape == (1, size)
        assert (output == output[0, 0]).all()
        answers.append(int(output[0, 0]))
    assert answers == [0, 0, 1, 2, 3]


async def test_more_than_the_limit_is_refused_with_the_numbers(make_lab):
    limits = Limits(arena=1024, batch=1_000_000)
    for isolation in "model", "none":
        async with make_lab(isolation=isolation, limits=limits) as lab:
            model = await lab.load("Identity", config("UINT8"))
            [[error]] = await run(model.instances[0], request(np.zeros(1_000_001, np.uint8)))
            assert isinstance(error, ResourceExhausted)
            assert "1000001" in error.message
            assert "1000000" in error.message
            strings = await lab.load("Misbehaving", config("BYTES", [1, 1]), name="strings")
            [[error]] = await run(strings.instances[0], request(np.array([[b"big 2000000"]], object)))
            assert isinstance(error, ResourceExhausted)
            assert error.message == (
                "model 'strings': the outputs of one execution take 2000004 bytes, of which 'OUTPUT0' 2000004 bytes; "
                "the limit is 1000000 bytes"
            )
            [[response]] = await run(strings.instances[0], request(np.array([[b"ok"]], object)))
            assert response.outputs["OUTPUT0"].item() == b"ok"


@pytest.mark.parametrize(
    ("command", "kind", "text"),
    [
        ("raise went wrong", Internal, "went wrong"),
        ("refuse not you", InvalidArgument, "not you"),
        ("leave early", Internal, "early"),
        ("nothing", Internal, "model 'm' returned no output 'OUTPUT0', got []"),
        ("none", Internal, "model 'm' returned no output 'OUTPUT0', got NoneType"),
        ("list", Internal, "model 'm' returned a list as output 'OUTPUT0', expected a numpy array"),
        (
            "dtype",
            Internal,
            "model 'm' returned data type FP32 for output 'OUTPUT0', expected BYTES as configured",
        ),
        (
            "scalar",
            Internal,
            "model 'm' returned shape [] for output 'OUTPUT0' of a batch of 1, expected 1 as its first dimension",
        ),
        (
            "rows",
            Internal,
            "model 'm' returned shape [2, 1] for output 'OUTPUT0' of a batch of 1, expected 1 as its first dimension",
        ),
    ],
)
async def test_what_a_model_does_wrong_is_said(both, command, kind, text):
    model = await both.load("Misbehaving", config("BYTES", [1], max_batch_size=4))
    (instance,) = model.instances
    [[error]] = await run(instance, request(np.array([[command.encode()]], object)))
    assert type(error) is kind
    assert error.message == text
    [[response]] = await run(instance, request(np.array([[b"extra"]], object)))
    assert list(response.outputs) == ["OUTPUT0"]


async def test_an_error_is_for_all_requests_of_the_batch(both):
    model = await both.load("Misbehaving", config("BYTES", [1], max_batch_size=4))
    results = await run(model.instances[0], *[request(np.array([[b"raise all"]], object))] * 3)
    assert [error.message for [error] in results] == ["all"] * 3


async def test_reshape_is_for_the_backend_only(both):
    model = await both.load(
        "Identity",
        {
            "max_batch_size": 4,
            "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1, 2], "reshape": {"shape": [2, -1, 1]}}],
            "output": [
                {"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [2, -1], "reshape": {"shape": [2, -1, 1]}}
            ],
        },
    )
    [[response]] = await run(model.instances[0], request(np.arange(12, dtype=np.float32).reshape(2, 3, 2)))
    assert response.outputs["OUTPUT0"].shape == (2, 2, 3)
    assert response.outputs["OUTPUT0"].ravel().tolist() == list(range(12))


async def test_ragged_rows_reach_an_array_backend_as_one_row_of_elements(both):
    model = await both.load("Ragged", config(dims=[-1], max_batch_size=4))
    rows = [np.float32([[1, 2]]), np.float32([[3, 4, 5]]), np.float32([[6]])]
    results = await run(model.instances[0], *map(request, rows))
    assert [r.outputs["OUTPUT0"].tolist() for [r] in results] == [[[1, 2, 3, 4, 5, 6]]] * 3


def ragged(datatype="FP32", *, scatter=True):
    name = f"TYPE_{datatype}"
    return {
        "max_batch_size": 4,
        "input": [{"name": "INPUT0", "data_type": name, "dims": [-1], "allow_ragged_batch": True}],
        "output": [
            {"name": "OUTPUT0", "data_type": name, "dims": [-1]},
            {"name": "OUTPUT1", "data_type": "TYPE_INT32", "dims": [1]},
        ],
        "batch_input": [{"target_name": ["COUNTS"], "data_type": "TYPE_INT32", "source_input": ["INPUT0"]}],
        "batch_output": [{"target_name": ["OUTPUT0"], "source_input": ["INPUT0"]}] if scatter else [],
    }


@pytest.mark.parametrize(
    ("datatype", "values", "wanted"),
    [
        ("FP32", [[[1, 2]], [[3, 4, 5]], [[6]]], [[[2, 4]], [[6, 8, 10]], [[12]]]),
        ("FP32", [[[1, 2]], [[3, 4]]], [[[2, 4]], [[6, 8]]]),
        ("FP32", [[[1, 2, 3]]], [[[2, 4, 6]]]),
        ("STRING", [[[b"a", b""]], [[b"bcd"]]], [[[b"aa", b""]], [[b"bcdbcd"]]]),
        ("STRING", [[[b"a", b"b"]]], [[[b"aa", b"bb"]]]),
    ],
)
async def test_an_output_is_scattered_to_the_requests_by_the_shapes_of_an_input(both, datatype, values, wanted):
    model = await both.load("Doubling", ragged(datatype))
    arrays = [np.array(value, object if datatype == "STRING" else np.float32) for value in values]
    results = await run(model.instances[0], *map(request, arrays))
    assert [r.outputs["OUTPUT0"].tolist() for [r] in results] == wanted
    assert [r.outputs["OUTPUT1"].tolist() for [r] in results] == [[[value.size]] for value in arrays]


async def test_a_scattered_output_needs_all_its_elements(both):
    model = await both.load("Ragged", ragged(scatter=True))
    results = await run(model.instances[0], *map(request, (np.float32([[1, 2]]), np.float32([[3]]))))
    assert [error.message for [error] in results] == [
        "model 'm' returned 9 elements for output 'OUTPUT0', expected 3: those of the shapes [1, 2], [1, 1]"
    ] * 2


async def test_only_the_requests_at_fault_fail_when_a_batch_is_refused(both):
    model = await both.load("Picky", config(dims=[-1], count=2, max_batch_size=8))
    values = [[[1.0], [2.0]], [[-1.0]], [[3.0]]]
    [[a], [b], [c]] = await run(
        model.instances[0],
        request(np.float32(values[0])),
        request(np.float32(values[1])),
        request(np.float32(values[2]), outputs=("OUTPUT1",)),
    )
    assert a.outputs["OUTPUT0"].tolist() == values[0]
    assert a.outputs["OUTPUT1"].tolist() == [[2], [2]]
    assert type(b) is InvalidArgument
    assert b.message == "a negative element"
    assert {name: array.tolist() for name, array in c.outputs.items()} == {"OUTPUT1": [[1]]}


async def test_large_answers_of_a_batch_that_was_refused(both):
    model = await both.load("Picky", config(dims=[-1], count=1, max_batch_size=8))
    big = np.arange(300_000, dtype=np.float32).reshape(1, -1)
    bad = np.float32([[-1] * 300_000])
    [[a], [b], [c]] = await run(model.instances[0], request(big), request(bad), request(big + 1))
    assert (a.outputs["OUTPUT0"] == big).all()
    assert isinstance(b, InvalidArgument)
    assert (c.outputs["OUTPUT0"] == big + 1).all()


async def test_most_backends_are_not_asked_whether_they_are_ready(both):
    model = await both.load("Identity", config())
    assert not model.checks_readiness


@pytest.mark.parametrize("answer", ["yes", "no", "raise"])
async def test_a_backend_says_whether_it_is_ready(both, answer, tmp_path):
    more = parameters(answer=answer, count=str(tmp_path / "count"))
    model = await both.load("Readiness", config(**more))
    assert model.checks_readiness
    if answer == "raise":
        with pytest.raises(InvalidArgument, match="cannot say"):
            await model.is_ready()
    else:
        assert await model.is_ready() is (answer == "yes")


async def test_a_backend_that_hangs_is_asked_once(lab, tmp_path, monkeypatch):
    monkeypatch.setattr("naiad.instances.hosts.READINESS_TIMEOUT_S", 0.2)
    count = tmp_path / "count"
    model = await lab.load("Readiness", config(**parameters(answer="hang", count=str(count))))
    for _ in range(2):
        answers = await asyncio.gather(*[model.is_ready() for _ in range(3)], return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unavailable] * 3
        assert answers[0].message == "Timed out waiting for user-defined is_ready() response"
    assert count.read_text() == "."


async def test_request_backends_see_single_requests(both):
    model = await both.load("Echo", config("INT32", [-1], max_batch_size=8))
    requests = [
        request(np.int32([[1, 2, 3]]), id="a", parameters={"p": 1.5, "q": True}, timeout_us=9, priority=2),
        request(np.int32([[4]]), sequence=SequenceControl("s", start=True, end=True), outputs=("OUTPUT0",)),
        request(np.int32([[5, 6], [7, 8]]), sequence=SequenceControl(12, end=True)),
        request(np.int32([[0]]), parameters={"refuse": True}),
    ]
    [[a], [b], [c], [d]] = await run(model.instances[0], *requests)
    assert a.outputs["OUTPUT0"].tolist() == [[1, 2, 3]]
    assert b.outputs["OUTPUT0"].tolist() == [[4]]
    assert c.outputs["OUTPUT0"].tolist() == [[5, 6], [7, 8]]
    assert a.parameters == {
        "id": "a",
        "outputs": "OUTPUT0",
        "correlation_id": 0,
        "flags": 0,
        "priority": 2,
        "timeout_us": 9,
        "p": 1.5,
        "q": True,
    }
    assert (b.parameters["correlation_id"], b.parameters["flags"]) == ("s", 3)
    assert (c.parameters["correlation_id"], c.parameters["flags"]) == (12, 2)
    assert isinstance(d, InvalidArgument)


async def test_a_forgotten_request_is_an_error_of_the_model(both):
    model = await both.load("Echo", config("INT32", [-1], max_batch_size=8))
    value = np.int32([[1]])
    [[forgotten], [answered]] = await run(
        model.instances[0], request(value, parameters={"forget": True}), request(value)
    )
    assert forgotten.message == "model 'm' did not answer 1 of the 2 requests of a batch"
    assert answered.outputs["OUTPUT0"].tolist() == [[1]]


async def test_bfloat16_reaches_request_backends(both):
    model = await both.load("Echo", config("BF16", [-1]))
    value = np.array([1.5, -2], ml_dtypes.bfloat16)
    [[response]] = await run(model.instances[0], request(value), rows=[1])
    assert response.outputs["OUTPUT0"].tolist() == [1.5, -2]


DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


async def test_decoupled_answers_come_after_the_execution(both):
    model = await both.load("Counting", config("INT32", [-1], max_batch_size=8, **DECOUPLED))
    (instance,) = model.instances
    batches = [Batch(request(np.int32([[5, 3]])), request(np.int32([[2, 200_000]]))) for _ in range(3)]
    for batch in batches:
        await available(instance)
        instance.execute(batch)
    for batch in batches:
        small, large = await batch.ended()
        assert [r.outputs["OUTPUT0"].tolist() for r in small[:-1]] == [[[n] * 3] for n in range(5)]
        assert [(r.outputs["OUTPUT0"].shape, r.outputs["OUTPUT0"][0, -1]) for r in large[:-1]] == [
            ((1, 200_000), 0),
            ((1, 200_000), 1),
        ]
        assert small[-1] is large[-1] is None


async def test_model_code_learns_that_a_client_has_left(both):
    model = await both.load("Counting", config("INT32", [-1], max_batch_size=8, **DECOUPLED))
    (instance,) = model.instances
    batch = Batch(request(np.int32([[-1, 0]])), request(np.int32([[1, 1]])))
    instance.execute(batch)
    await batch.answered(1)
    assert not batch.finals[0]
    instance.cancel(batch, 0)
    await batch.ended()


async def test_model_code_learns_of_a_client_that_leaves_before_its_request_arrives(make_lab):
    """What is told by one socket may overtake what is sent by another, surely so where a thread copies inputs first."""
    async with make_lab(limits=Limits(arena=2**20)) as lab:
        model = await lab.load("Counting", config("INT32", [-1], **DECOUPLED))
        (instance,) = model.instances
        for inputs in np.full(3_000_000, -1, np.int32), np.int32([-1, 0]):
            batch = Batch(request(inputs), rows=[1])
            instance.execute(batch)
            instance.cancel(batch, 0)
            await batch.ended()
            await available(instance)


async def test_unloading_fails_decoupled_requests_that_do_not_end(both):
    model = await both.load("Counting", config("INT32", [-1], max_batch_size=8, **DECOUPLED))
    batch = Batch(request(np.int32([[-1, 0]])))
    model.instances[0].execute(batch)
    await model.close(timeout_s=0.1)
    [[error]] = await batch.ended()
    assert isinstance(error, Unavailable)
    assert "was unloaded" in error.message


async def test_instances_of_a_model_run_side_by_side(both):
    model = await both.load("Rendezvous", config(dims=[1]), instances=3)
    batches = [Batch(request(np.float32([1])), rows=[1]) for _ in model.instances]
    for instance, batch in zip(model.instances, batches, strict=True):
        instance.execute(batch)
    for batch in batches:
        [[response]] = await batch.ended()
        assert response.outputs["OUTPUT0"].tolist() == [1]


async def test_completion_comes_from_the_backend(both):
    model = await both.open("Identity")
    assert await model.complete({"name": "m"}) == {"name": "m", "max_batch_size": 4}
    await model.close()
    model = await both.open("Identity")
    with pytest.raises(InvalidArgument, match=r"^no such model file$"):
        await model.complete(parameters(complete_fails="no such model file"))


async def test_a_completion_that_cannot_travel_is_refused_and_the_host_lives(lab):
    model = await lab.open("Identity")
    with pytest.raises(Internal, match=r"^Encoding objects of type numpy.int64 is unsupported$"):
        await model.complete(parameters(complete_oddly="yes"))
    assert await model.complete({"name": "m"}) == {"name": "m", "max_batch_size": 4}


async def test_a_failed_constructor_fails_the_load_with_its_text(both):
    model = await both.open("Identity")
    with pytest.raises(Internal, match=r"^cannot open the file$"):
        await model.load({**config(), **parameters(fail="cannot open the file")}, [InstanceContext("i", "KIND_CPU")])
    await model.close()


async def test_model_code_logs_and_calls(make_lab):
    calls = []

    def on_call(caller, method, arguments, reply):
        asked = msgspec.msgpack.decode(arguments)
        calls.append((caller.model, caller.version, method, asked))
        if method == "refuse":
            reply(None, InvalidArgument("not so"))
        else:
            asyncio.get_running_loop().call_soon(reply, [asked, b"bytes"], None)

    for isolation in "model", "none":
        gone = []
        async with make_lab(isolation=isolation, on_call=on_call, on_gone=gone.append) as lab:
            model = await lab.load("Caller", config("BYTES", [1]))
            [[response]] = await run(model.instances[0], request(np.array([b"echo"], object)), rows=[1])
            assert response.outputs["OUTPUT0"].tolist() == [b"[{'a': [1, 2.5, None]}, b'bytes']"]
            [[error]] = await run(model.instances[0], request(np.array([b"refuse"], object)), rows=[1])
            assert isinstance(error, InvalidArgument)
            assert error.message == "not so"
            assert ("m", 1, "INFO", "calling echo", "model.py", 7) in lab.logs
            assert not gone
            await model.close()
            assert [(caller.model, caller.version) for caller in gone] == [("m", 1)]
    assert calls[0] == ("m", 1, "echo", {"a": [1, 2.5, None]})


@pytest.mark.parametrize(
    ("isolation", "backend", "places"),
    [("model", "Identity", 1), ("model", "Processes", 2), ("none", "Identity", 2)],
)
async def test_threads_of_a_host_have_the_same_place(make_lab, isolation, backend, places):
    async with make_lab(isolation=isolation) as lab:
        model = await lab.load(backend, config("BYTES"), instances=2)
        assert len({instance.place for instance in model.instances}) == places


async def test_server_and_host_wait_awake_for_what_came_soon(make_lab, monkeypatch):
    asked = []
    monkeypatch.setattr(AwakeLoop, "stay_awake", lambda self, now: asked.append(self.window_ns))
    window_ns = 10**12  # so that all comes soon
    async with make_lab(busy_poll_ns=window_ns) as lab:
        model = await lab.load("Processes", config("BYTES"))
        [instance] = model.instances
        counts = []
        for value in (b"1", b"2", b"3"):
            [[answer]] = await run(instance, request([value]))
            assert answer.outputs["OUTPUT0"] == [value]
            counts.append(len(asked))
        # The first batch and its results come for the first time, the others are waited for.
        assert counts == [0, 2, 4]
        assert set(asked) == {window_ns}
        async with asyncio.timeout(60):
            # If others want the core it sleeps, and does no more than try again.
            while state(*model.pids) != "R":
                await run(instance, request([b"x"]))


async def test_hosts_sleep_where_nothing_came_soon(make_lab):
    async with make_lab(busy_poll_ns=1) as lab:
        model = await lab.load("Processes", config("BYTES"))
        for _ in range(3):
            await run(model.instances[0], request([b"x"]))
        await until(lambda: state(*model.pids) == "S")


def state(pid):
    """R for a process that runs, S for one that sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
