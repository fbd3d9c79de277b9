"""Stateful models through a real server: sequences, implicit state, iterative sequences, warm-up."""

from contextlib import contextmanager
from queue import Queue

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from onnx import TensorProto, helper, save
from served import Repository, Server, put
from tritonclient.utils import InferenceServerException

INSTANCE = "instance_group [ { count: 1 kind: KIND_CPU } ]"
VALUE = 'input [ { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] } ]'
SUM = """output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] },
         { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]"""
CONTROLS = """control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ -1, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } ] } ]"""


def sequence_config(max_batch_size, strategy, corrid="UINT64", more="", inside=""):
    return f"""backend: "python" max_batch_size: {max_batch_size} {VALUE} {SUM} {INSTANCE} {more}
        sequence_batching {{ {strategy} {CONTROLS % corrid} {inside} }}"""


#: Sums per sequence; SEEN tells of every row of the batch. 666 kills the process.
SUMMING = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        rows = []
        for request in requests:
            def get(name):
                return pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]
            rows.append([get(name) for name in ("START", "END", "READY", "CORRID", "VALUE")])
        seen = " ".join(f"{s:g},{e},{int(r)},{c.decode() if isinstance(c, bytes) else c}" for s, e, r, c, v in rows)
        responses = []
        for request, (start, end, ready, key, value) in zip(requests, rows):
            if value == 666:
                os._exit(3)
            if value < 0:
                raise ValueError("below zero")
            if ready:
                self.sums[key] = value + (0 if start else self.sums[key])
            shape = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy().shape
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", np.full(shape, self.sums.get(key, 0), np.int32)),
                pb_utils.Tensor("SEEN", np.full(shape, seen, np.object_))]))
        return responses
"""

#: A model without the sequence's state in it: what it gets as STATE_IN plus VALUE is SUM and STATE_OUT.
STATEFUL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            text = pb_utils.get_input_tensor_by_name(request, "TEXT_IN").as_numpy().ravel()[0]
            if value.ravel()[0] < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("below zero")))
                continue
            text += str(value.ravel()[0]).encode()
            # A state that grows with every step.
            grown = np.append(pb_utils.get_input_tensor_by_name(request, "GROWING_IN").as_numpy().ravel(), value)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("TEXT_OUT", np.array([[text]], np.object_)),
                pb_utils.Tensor("GROWING_OUT", grown.reshape(1, -1).astype(np.int32)),
                pb_utils.Tensor("SUM", grown.sum(dtype=np.int32).reshape(1, 1))]))
        return responses
"""

#: Counts VALUE down, one per execution; SEEN are the sizes of the batches the request was in.
COUNTDOWN = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key = request.correlation_id()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]
            if start:
                value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy().ravel()[0]
                self.left[key] = [value, []]
            state = self.left[key]
            state[0] -= 1
            state[1].append(f"{int(start)}{request.flags()}{len(requests)}")
            if state[0] > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
                time.sleep(0.002)
                continue
            del self.left[key]
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", np.array([[len(state[1])]], np.int32)),
                pb_utils.Tensor("SEEN", np.array([[" ".join(state[1])]], np.object_))]))
        return responses
"""

#: The same as a decoupled model: a response for each execution.
COUNTDOWN_DECOUPLED = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            if pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]:
                self.left[key] = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy().ravel()[0]
            self.left[key] -= 1
            last = self.left[key] <= 0
            response = pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", np.array([[self.left[key]]], np.int32)),
                pb_utils.Tensor("SEEN", np.array([[""]], np.object_))])
            sender = request.get_response_sender()
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
            if not last:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None
"""

#: Writes down which instance has executed what, or fails where VALUE is 7.
NOTING = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.file = os.path.join(args["model_repository"], "executed")

    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = sorted((t.name(), t.as_numpy().ravel().tolist()) for t in request.inputs())
            with open(self.file, "a") as file:
                print(self.name, len(requests), inputs, file=file)
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            if value.ravel()[0] == 7:
                raise ValueError("seven")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""


def accumulating_onnx(path):
    """SUM and STATE_OUT are VALUE + STATE_IN, or VALUE alone where START is 1."""
    nodes = [
        helper.make_node("Sub", ["one", "START"], ["keep"]),
        helper.make_node("Mul", ["STATE_IN", "keep"], ["kept"]),
        helper.make_node("Add", ["VALUE", "kept"], ["SUM"]),
        helper.make_node("Identity", ["SUM"], ["STATE_OUT"]),
    ]
    shape = ["batch", 1]
    graph = helper.make_graph(
        nodes,
        "accumulate",
        [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in ("VALUE", "STATE_IN", "START")],
        [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in ("SUM", "STATE_OUT")],
        [helper.make_tensor("one", TensorProto.INT32, [1], [1])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


STATE = """state [ { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ] %s } ]"""
START = 'control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]'


def add(repository, name, config, code=None, files=()):
    """Writes a model: config.pbtxt, model.py, and (path in the model's folder, content)."""
    folder = repository.path / name
    (folder / "1").mkdir(parents=True)
    put(folder / "config.pbtxt", config)
    if code is not None:
        put(folder / "1" / "model.py", code)
    for path, data in files:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)


@contextmanager
def grpc_client(server):
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.ports[1]}")
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = Repository(tmp_path_factory.mktemp("models"))
    long = "max_sequence_idle_microseconds: 60000000"
    add(repository, "direct", sequence_config(4, f"direct {{ }} {long}"), SUMMING)
    add(repository, "oldest", sequence_config(4, f"oldest {{ max_candidate_sequences: 4 }} {long}", "INT32"), SUMMING)
    add(repository, "one_slot", sequence_config(0, f"direct {{ }} {long}", "STRING"), SUMMING)
    add(repository, "one_candidate", sequence_config(4, f"oldest {{ max_candidate_sequences: 1 }} {long}"), SUMMING)
    add(repository, "restless", sequence_config(0, "direct { } max_sequence_idle_microseconds: 200000"), SUMMING)
    add(repository, "fragile", sequence_config(4, f"direct {{ }} {long}"), SUMMING)
    onnx = f"""backend: "onnxruntime" max_batch_size: 4 {VALUE} {INSTANCE}
        output [ {{ name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }} ]
        sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} {START} {long} %s }}"""
    add(repository, "onnx_zero", onnx % (STATE % ""))
    from_file = 'initial_state: { name: "first" data_type: TYPE_INT32 dims: [ 1 ] data_file: "first.bin" }'
    add(
        repository,
        "onnx_file",
        (onnx % (STATE % from_file)).replace(START, ""),
        files=[("initial_state/first.bin", np.array([100], np.int32).tobytes())],
    )
    for name in ("onnx_zero", "onnx_file"):
        accumulating_onnx(repository.path / name / "1" / "model.onnx")
    # Without the control input the model's START would be missing.
    path = repository.path / "onnx_file" / "config.pbtxt"
    path.write_text(
        path.read_text().replace("sequence_batching {", f"sequence_batching {{ {START.replace('0, 1', '0, 0')}")
    )
    add(
        repository,
        "python_state",
        f"""backend: "python" max_batch_size: 4 {VALUE} {INSTANCE}
        output [ {{ name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }},
                 {{ name: "TEXT_OUT" data_type: TYPE_STRING dims: [ 1 ] }} ]
        sequence_batching {{ direct {{ }} {long}
          state [ {{ input_name: "TEXT_IN" output_name: "TEXT_OUT" data_type: TYPE_STRING dims: [ 1 ] }},
                  {{ input_name: "GROWING_IN" output_name: "GROWING_OUT" data_type: TYPE_INT32 dims: [ -1 ] }} ] }}""",
        STATEFUL,
    )
    iterative = f"{START} iterative_sequence: true"
    add(
        repository,
        "countdown",
        f'backend: "python" max_batch_size: 4 {VALUE} {SUM} {INSTANCE} sequence_batching {{ direct {{ }} {iterative} }}',
        COUNTDOWN,
    )
    add(
        repository,
        "countdown_decoupled",
        f"""backend: "python" max_batch_size: 4 {VALUE} {SUM} {INSTANCE} model_transaction_policy {{ decoupled: true }}
        sequence_batching {{ oldest {{ max_candidate_sequences: 2 }} {iterative} }}""",
        COUNTDOWN_DECOUPLED,
    )
    with Server(repository) as server:
        yield server.started()


@pytest.fixture(scope="module")
def client(server):
    with grpc_client(server) as client:
        yield client


def inputs_of(value, shape=(1, 1)):
    tensor = grpcclient.InferInput("VALUE", shape, "INT32")
    tensor.set_data_from_numpy(np.full(shape, value, np.int32))
    return [tensor]


def infer(client, model, key, value, *, flags="", shape=(1, 1), output="SUM", **more):
    """One request; flags "s" and "e" start and end the sequence. Its output, BYTES decoded."""
    result = client.infer(
        model,
        inputs_of(value, shape),
        sequence_id=key,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
        **more,
    )
    (element,) = result.as_numpy(output).ravel()
    return element.decode() if isinstance(element, bytes) else int(element)


def send(client, model, key, value, results, *, flags="", shape=(1, 1), **more):
    """The same without waiting; (value sent, result or error) goes to the queue `results`."""
    return client.async_infer(
        model,
        inputs_of(value, shape),
        lambda result, error: results.put((value, result if error is None else error)),
        sequence_id=key,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
        **more,
    )


def number(result, output="SUM"):
    return int(result.as_numpy(output).ravel()[0])


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_sequences_keep_apart(client, model):
    for key in (1, 2, 3):
        assert infer(client, model, key, 10 * key, flags="s") == 10 * key
    for key in (3, 1, 2):
        assert infer(client, model, key, 1) == 10 * key + 1
    for key in (2, 3, 1):
        assert infer(client, model, key, 1, flags="e") == 10 * key + 2


def test_a_row_without_a_request_is_not_ready(client):
    infer(client, "direct", 11, 1, flags="s")
    infer(client, "direct", 12, 1, flags="s")
    # Slot 0 is padded: neither start, end nor ready, and no correlation id.
    assert infer(client, "direct", 12, 1, flags="e", output="SEEN") == "0,-1,0,0 0,1,1,12"
    assert infer(client, "direct", 11, 1, flags="e", output="SEEN") == "0,1,1,11"


def test_oldest_has_no_gaps(client):
    infer(client, "oldest", 11, 1, flags="s")
    assert infer(client, "oldest", 12, 1, flags="se", output="SEEN") == "1,1,1,12"
    infer(client, "oldest", 11, 1, flags="e")


def test_text_as_correlation_id(client):
    assert infer(client, "one_slot", "session", 1, flags="s", shape=(1,), output="SEEN") == "1,-1,1,session"
    assert infer(client, "one_slot", "session", 2, flags="e", shape=(1,)) == 3


def test_requests_count_and_rows_of_empty_slots_do_not(client):
    before = client.get_inference_statistics("direct").model_stats[0]
    infer(client, "direct", 21, 1, flags="s")
    infer(client, "direct", 22, 1, flags="s")
    infer(client, "direct", 22, 1, flags="e")
    infer(client, "direct", 21, 1, flags="e")
    after = client.get_inference_statistics("direct").model_stats[0]
    assert after.inference_count - before.inference_count == 4
    assert after.execution_count - before.execution_count == 4
    assert after.inference_stats.success.count - before.inference_stats.success.count == 4


def test_an_error_of_the_model_does_not_end_the_sequence(client):
    infer(client, "direct", 31, 5, flags="s")
    with pytest.raises(InferenceServerException, match="below zero"):
        infer(client, "direct", 31, -1)
    assert infer(client, "direct", 31, 1, flags="e") == 6


def test_a_start_over_a_live_sequence_begins_anew(client, server):
    infer(client, "direct", 41, 5, flags="s")
    assert infer(client, "direct", 41, 1, flags="s") == 1
    assert infer(client, "direct", 41, 1, flags="e") == 2
    assert "sequence 41 starts before the one of that correlation id has ended" in server.log


@pytest.mark.parametrize(("model", "shape"), [("one_slot", (1,)), ("one_candidate", (1, 1))])
def test_the_backlog_waits_for_a_slot(client, model, shape):
    results = Queue()
    infer(client, model, "51", 1, flags="s", shape=shape)
    send(client, model, "52", 100, results, flags="s", shape=shape)
    send(client, model, "52", 200, results, flags="e", shape=shape)
    # Both are in the backlog while the first sequence has the only slot.
    assert infer(client, model, "51", 1, shape=shape) == 2
    assert results.empty()
    assert infer(client, model, "51", 1, flags="e", shape=shape) == 3
    answers = dict(results.get(timeout=20) for _ in range(2))
    assert {value: number(result) for value, result in answers.items()} == {100: 100, 200: 300}


def test_waiting_too_long_for_a_slot_ends_the_sequence(client):
    results = Queue()
    infer(client, "one_slot", "61", 1, flags="s", shape=(1,))
    send(client, "one_slot", "62", 1, results, flags="s", shape=(1,), timeout=50_000)
    _, error = results.get(timeout=20)
    assert "timeout of the corresponding sequence has been expired" in str(error)
    assert infer(client, "one_slot", "61", 1, flags="e", shape=(1,)) == 2


def test_cancelling_a_request_cancels_those_behind_it(client):
    results = Queue()
    infer(client, "one_slot", "71", 1, flags="s", shape=(1,))
    first = send(client, "one_slot", "72", 1, results, flags="s", shape=(1,))
    send(client, "one_slot", "72", 2, results, shape=(1,))
    infer(client, "one_slot", "71", 1, shape=(1,))
    first.cancel()
    errors = [results.get(timeout=20)[1] for _ in range(2)]
    assert all(error.status() == "StatusCode.CANCELLED" for error in errors)
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        infer(client, "one_slot", "72", 1, shape=(1,))
    infer(client, "one_slot", "71", 1, flags="e", shape=(1,))


def test_rest_ends_a_sequence(client):
    results = Queue()
    infer(client, "restless", 81, 1, flags="s", shape=(1,))
    # Gets the only slot when the first sequence has rested too long.
    send(client, "restless", 82, 7, results, flags="se", shape=(1,))
    assert number(results.get(timeout=20)[1]) == 7
    with pytest.raises(
        InferenceServerException, match="for sequence 81 to model 'restless' must specify the START flag"
    ):
        infer(client, "restless", 81, 1, shape=(1,))


def test_sequences_end_with_their_host_and_say_so(client):
    infer(client, "fragile", 91, 1, flags="s")
    infer(client, "fragile", 92, 1, flags="s")
    with pytest.raises(InferenceServerException, match="exit"):
        infer(client, "fragile", 91, 666)
    for key in (91, 92):
        with pytest.raises(InferenceServerException) as error:
            infer(client, "fragile", key, 1)
        assert error.value.status() == "StatusCode.UNAVAILABLE"
        assert f"sequence {key} of model 'fragile' has ended early" in error.value.message()
    # The host is started again; so can the sequences be.
    assert infer(client, "fragile", 92, 3, flags="s") == 3
    assert infer(client, "fragile", 92, 3, flags="e") == 6


def test_state_of_an_onnx_model(client):
    for key in (101, 102):
        assert infer(client, "onnx_zero", key, key, flags="s") == key
    assert infer(client, "onnx_zero", 101, 1) == 102
    assert infer(client, "onnx_zero", 102, 2) == 104
    assert infer(client, "onnx_zero", 101, 1, flags="e") == 103
    with pytest.raises(InferenceServerException, match="unexpected inference output 'STATE_OUT'"):
        client.infer("onnx_zero", inputs_of(1), outputs=[grpcclient.InferRequestedOutput("STATE_OUT")], sequence_id=102)
    result = client.infer("onnx_zero", inputs_of(1), sequence_id=102, sequence_end=True)
    assert [output.name for output in result.get_response().outputs] == ["SUM"]


def test_initial_state_from_a_file(client):
    assert infer(client, "onnx_file", 111, 1, flags="s") == 101
    assert infer(client, "onnx_file", 111, 1, flags="e") == 102
    assert infer(client, "onnx_file", 111, 5, flags="se") == 105


def test_state_of_a_python_model_that_grows_and_is_shown(client):
    for key in (121, 122):
        assert infer(client, "python_state", key, 1, flags="s", output="TEXT_OUT") == "1"
    assert infer(client, "python_state", 121, 2, output="TEXT_OUT") == "12"
    assert infer(client, "python_state", 121, 3) == 6
    # A failed step leaves the state as it was.
    with pytest.raises(InferenceServerException, match="below zero"):
        infer(client, "python_state", 121, -4)
    assert infer(client, "python_state", 121, 4, flags="e", output="TEXT_OUT") == "1234"
    # States of different shapes do not share a batch.
    assert infer(client, "python_state", 122, 5, flags="e", output="TEXT_OUT") == "15"


def test_requests_join_an_iterative_sequence_on_its_way(client):
    results = Queue()
    send(client, "countdown", 0, 200, results)
    while client.get_inference_statistics("countdown").model_stats[0].execution_count < 2:
        pass
    send(client, "countdown", 0, 3, results)
    first, second = (results.get(timeout=30) for _ in range(2))
    assert (first[0], number(first[1])) == (3, 3)
    assert (second[0], number(second[1])) == (200, 200)
    # START at first, flag 1; nothing after; the long request beside it.
    assert first[1].as_numpy("SEEN").ravel()[0].decode() == "112 002 002"
    statistics = client.get_inference_statistics("countdown").model_stats[0]
    # Every iteration is an inference; those of both requests at once share an execution.
    assert statistics.inference_stats.success.count == statistics.inference_count == 203
    assert statistics.execution_count == 200


def test_iterations_of_a_decoupled_model(client):
    results = Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    try:
        client.async_stream_infer("countdown_decoupled", inputs_of(3), enable_empty_final_response=True)
        answers = [results.get(timeout=20) for _ in range(3)]
    finally:
        client.stop_stream()
    assert [number(answer) for answer in answers] == [2, 1, 0]
    finals = [answer.get_response().parameters["triton_final_response"].bool_param for answer in answers]
    assert finals == [False, False, True]


def test_the_test_hook_holds_requests_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
    repository = Repository(tmp_path / "models")
    add(repository, "held", sequence_config(4, "direct { }"), SUMMING)
    results = Queue()
    with Server(repository) as server, grpc_client(server.started()) as client:
        for key in (1, 2):
            send(client, "held", key, key, results, flags="se")
        # Requests of a connection are taken in order: when this is answered, the two wait.
        assert client.is_server_live()
        assert results.empty()
        send(client, "held", 3, 3, results, flags="se")
        answers = [results.get(timeout=20)[1] for _ in range(3)]
        assert all(len(answer.as_numpy("SEEN").ravel()[0].split()) == 3 for answer in answers)
        # From then on nothing is held.
        assert infer(client, "held", 4, 4, flags="se") == 4


WARM = """backend: "python" %s input [ { name: "VALUE" data_type: TYPE_%s dims: [ 2 ] } ]
    output [ { name: "OUT" data_type: TYPE_%s dims: [ 2 ] } ] %s
    model_warmup [ { name: "sample" batch_size: %d count: %d
        inputs { key: "VALUE" value { data_type: TYPE_%s dims: [ 2 ] %s } } } ]"""


def warm(more="", datatype="INT32", batch_size=1, count=1, data="zero_data: true", instances=1):
    group = f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]"
    return WARM % (more, datatype, datatype, group, batch_size, count, datatype, data)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    repository = Repository(tmp_path_factory.mktemp("models"))
    eight = np.array([8, 9], np.int32).tobytes()
    seven = np.array([7, 7], np.int32).tobytes()
    controls = f"max_batch_size: 4 sequence_batching {{ {START} {STATE % ''} }}"
    add(repository, "zero", warm("max_batch_size: 4", batch_size=3, count=2, instances=2), NOTING)
    add(repository, "file", warm(data='input_data_file: "v"'), NOTING, [("warmup/v", eight)])
    add(repository, "random", warm(datatype="FP32", data="random_data: true"), NOTING)
    add(repository, "skipped", warm(batch_size=0, data='input_data_file: "v"'), NOTING, [("warmup/v", seven)])
    add(repository, "sequence", warm(controls, data='input_data_file: "v"'), NOTING, [("warmup/v", eight)])
    add(repository, "text", warm(datatype="STRING", data="random_data: true"), NOTING)
    add(repository, "failing", warm(data='input_data_file: "v"'), NOTING, [("warmup/v", seven)])
    add(repository, "short", warm(data='input_data_file: "v"'), NOTING, [("warmup/v", b"1234567")])
    add(repository, "large", warm("max_batch_size: 4", batch_size=5), NOTING)
    with Server(repository, flags=("--exit-on-error=false",)) as server:
        server.repository = repository
        yield server.started()


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ("zero", [f"zero_0_{i} 3 [('VALUE', [0, 0])]" for i in (0, 1) for _ in range(6)]),
        ("file", ["file_0_0 1 [('VALUE', [8, 9])]"]),
        ("sequence", ["sequence_0_0 1 [('START', [1]), ('STATE_IN', [0]), ('VALUE', [8, 9])]"]),
        ("text", ["text_0_0 1 [('VALUE', [b'', b''])]"]),
    ],
)
def test_every_instance_is_warm_before_it_is_ready(warmed, model, lines):
    with grpc_client(warmed) as client:
        assert client.is_model_ready(model)
        assert client.get_inference_statistics(model).model_stats[0].inference_count == len(lines)
    executed = (warmed.repository.path / model / "executed").read_text().splitlines()
    assert sorted(executed) == lines


def test_random_data(warmed):
    (line,) = (warmed.repository.path / "random" / "executed").read_text().splitlines()
    values = eval(line.removeprefix("random_0_0 1 "))[0][1]
    assert len(set(values)) == 2
    assert all(0 <= value < 1 for value in values)


def test_a_sample_of_no_requests_is_skipped(warmed):
    with grpc_client(warmed) as client:
        assert client.is_model_ready("skipped")
    assert not (warmed.repository.path / "skipped" / "executed").exists()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            "failing",
            "Invalid argument: failed to run warmup sample 'sample': Failed to process the request(s) for model",
        ),
        (
            "short",
            "Invalid argument: [request id: <id_unknown>] warmup setting expects 8 bytes, but the data provided from vonly has 7 bytes",
        ),
        (
            "large",
            "Invalid argument: failed to run warmup sample 'sample': "
            + "batch size 5 for 'large_0_0', max allowed is 4; " * 5,
        ),
    ],
)
def test_a_sample_that_fails_fails_the_load(warmed, model, reason):
    with grpc_client(warmed) as client:
        assert not client.is_model_ready(model)
        index = {entry.name: entry for entry in client.get_model_repository_index().models}
    assert index[model].state == "UNAVAILABLE"
    assert index[model].reason.startswith(reason)
