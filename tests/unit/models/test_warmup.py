"""Warm-up samples as requests, and what becomes of those that cannot be run."""

import asyncio

import numpy as np
import pytest

from naiad.config.model_config import ModelConfig
from naiad.config.parse import parse_text
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable
from naiad.instances.instance import ComputeTimes
from naiad.messages import InferResponse, SequenceControl
from naiad.models.warmup import samples_of, warm_up
from naiad.statistics import ModelStatistics
from naiad.telemetry.log import Log

SEQUENCE = """sequence_batching {
    control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    control_input { name: "R" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
    state { input_name: "SI" output_name: "SO" data_type: TYPE_INT8 dims: [ 2 ] } }"""


def config(sample, datatype="INT16", max_batch_size=4, more="", count=1, dims="2"):
    return ModelConfig(
        parse_text(
            f'name: "m" backend: "b" max_batch_size: {max_batch_size} {more} '
            f'input {{ name: "IN" data_type: TYPE_{datatype} dims: [ {dims} ] }} '
            f'output {{ name: "OUT" data_type: TYPE_{datatype} dims: [ {dims} ] }} '
            f'model_warmup {{ name: "s" count: {count} {sample} }}'
        )
    )


def sample(data, datatype="INT16", dims="2", batch_size=1, name="IN", more=""):
    value = f"{{ data_type: TYPE_{datatype} dims: [ {dims} ] {data} }}"
    return f'batch_size: {batch_size} inputs {{ key: "{name}" value {value} }} {more}'


def requests_of(configuration, directory):
    ((_, requests),) = samples_of(configuration, 3, directory)
    return requests


@pytest.mark.parametrize(("max_batch_size", "shape"), [(4, (1, 2)), (0, (2,))])
def test_zeros(tmp_path, max_batch_size, shape):
    (request,) = requests_of(config(sample("zero_data: true"), max_batch_size=max_batch_size), tmp_path)
    (tensor,) = request.inputs
    assert (tensor.name, tensor.shape, tensor.data) == ("IN", shape, bytes(4))
    assert (request.model_name, request.model_version) == ("m", 3)


def test_a_batch_is_made_of_requests_of_one_row(tmp_path):
    requests = requests_of(config(sample("zero_data: true", batch_size=3)), tmp_path)
    assert [request.inputs[0].shape for request in requests] == [(1, 2)] * 3


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "FP64", "BF16"])
def test_random_values_are_values_of_their_type(tmp_path, datatype):
    (request,) = requests_of(config(sample("random_data: true", datatype, "1000"), datatype, dims="1000"), tmp_path)
    (tensor,) = request.inputs
    values = np.frombuffer(tensor.data, tensor.datatype.numpy)
    assert len(values) == 1000
    assert len(set(values.tolist())) > 1
    if datatype == "BOOL":
        assert set(tensor.data) == {0, 1}
    elif "F" in datatype:
        assert np.isfinite(values.astype(float)).all()
        assert 0 <= values.min() <= values.max() <= 1


def test_there_may_be_much_text(tmp_path):
    dims = str(1 << 19)
    (request,) = requests_of(config(sample("zero_data: true", "STRING", dims), "STRING", dims=dims), tmp_path)
    assert len(request.inputs[0].data) == 4 << 19


@pytest.mark.parametrize("data", ["zero_data: true", "random_data: true"])
def test_text_is_empty(tmp_path, data):
    (request,) = requests_of(config(sample(data, "STRING"), "STRING"), tmp_path)
    assert request.inputs[0].data == bytes(8)


@pytest.mark.parametrize(
    ("datatype", "content", "used"),
    [("INT16", b"\1\2\3\4\5", b"\1\2\3\4"), ("STRING", b"\1\0\0\0a\0\0\0\0", b"\1\0\0\0a\0\0\0\0")],
)
def test_files(tmp_path, datatype, content, used):
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "f").write_bytes(content)
    (request,) = requests_of(config(sample('input_data_file: "f"', datatype), datatype), tmp_path)
    assert request.inputs[0].data == used


@pytest.mark.parametrize(
    ("sample_text", "message"),
    [
        (sample('input_data_file: "f"'), "failed to open text file for read .*warmup/f: No such file or directory"),
        (sample("zero_data: true", "INT8"), "inference input 'IN' data-type is 'INT8', but model 'm' expects 'INT16'"),
        (sample("zero_data: true", dims="3"), r"unexpected shape for input 'IN' for model 'm'. Expected \[-1,2\]"),
        (
            sample("zero_data: true", name="X"),
            r"expected 1 inputs but got 0 inputs for model 'm'\. Got input\(s\) \[\], but missing required input\(s\) \['IN'\]",
        ),
        ("batch_size: 1", r"expected 1 inputs but got 0 inputs for model 'm'"),
        (
            sample("zero_data: true", batch_size=5),
            "failed to run warmup sample 's': " + "batch size 5 for '', max allowed is 4; " * 5,
        ),
    ],
)
def test_samples_that_do_not_fit(tmp_path, sample_text, message):
    with pytest.raises(NaiadError, match=message):
        requests_of(config(sample_text), tmp_path)


def test_a_sample_without_requests_is_skipped(tmp_path):
    assert list(samples_of(config("batch_size: 0"), 1, tmp_path)) == []


def test_for_a_sequence_model_each_request_is_a_whole_sequence(tmp_path):
    requests = requests_of(config(sample("zero_data: true", batch_size=2), more=SEQUENCE), tmp_path)
    assert [request.sequence for request in requests] == [
        SequenceControl(1, True, True),
        SequenceControl(2, True, True),
    ]
    for request in requests:
        assert {tensor.name: tensor.data for tensor in request.inputs} == {
            "IN": bytes(4),
            "S": b"\1\0\0\0",
            "R": b"\1",
            "SI": b"\0\0",
        }


def test_a_sample_may_give_control_inputs_itself(tmp_path):
    more = 'inputs { key: "S" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }'
    (request,) = requests_of(config(sample("zero_data: true", more=more), more=SEQUENCE), tmp_path)
    assert {tensor.name: tensor.data for tensor in request.inputs}["S"] == bytes(4)


class FakeInstance:
    """Answers on the next turn of the loop, like a decoupled model: first all is executed, then answered."""

    name = "i"
    is_available = True

    def __init__(self, error=None, responses=1):
        self.executed = 0
        self.error = error
        self.responses = responses

    def execute(self, batch):
        self.executed += 1
        asyncio.get_running_loop().call_soon(self._complete, batch)

    def _complete(self, batch):
        assert not batch.ended.done()
        batch.complete(ComputeTimes(1, 2, 3, 4))
        asyncio.get_running_loop().call_soon(self._answer, batch)

    def _answer(self, batch):
        for index in range(len(batch.requests)):
            assert not batch.ended.done()
            for _ in range(self.responses):
                batch.deliver(index, InferResponse("m", 1, "", ()), False)
            batch.deliver(index, self.error, True)


async def test_every_sample_runs_so_often_on_every_instance(tmp_path):
    instances = [FakeInstance(), FakeInstance(responses=0)]
    log = Log()
    log.configure(verbose=1, file=str(tmp_path / "log"))
    statistics = ModelStatistics("m", "1")
    await warm_up(config(sample("zero_data: true", batch_size=2), count=3), 1, tmp_path, instances, statistics, log)
    # As Triton counts them.
    assert (statistics.inference_count, statistics.execution_count, statistics.infer.success.count) == (12, 6, 12)
    assert (list(statistics.batches), statistics.infer.compute_infer.ns) == ([2], 12)
    assert [instance.executed for instance in instances] == [3, 3]
    log.close()
    logged = (tmp_path / "log").read_text()
    assert [logged.count(f"model 'm' instance i is running warmup sample 's' for iteration {n}") for n in (1, 3)] == [
        2,
        2,
    ]


@pytest.mark.parametrize("error", [Internal("An Error Occurred"), InvalidArgument("An Error Occurred")])
async def test_a_failing_sample_is_named(tmp_path, error):
    with pytest.raises(InvalidArgument) as caught:
        await warm_up(
            config(sample("zero_data: true")),
            1,
            tmp_path,
            [FakeInstance(), FakeInstance(error)],
            ModelStatistics("m", "1"),
            Log(),
        )
    assert caught.value.message == "failed to run warmup sample 's': An Error Occurred; "


async def test_an_instance_that_is_gone_fails_the_load(tmp_path):
    instance = FakeInstance(Unavailable("host process 'm' exited"))
    with pytest.raises(NaiadError, match="failed to run warmup sample 's': host process 'm' exited"):
        await warm_up(
            config(sample("zero_data: true"), count=2), 1, tmp_path, [instance], ModelStatistics("m", "1"), Log()
        )
    instance.is_available = False
    with pytest.raises(NaiadError, match="instance 'i' is not available"):
        await warm_up(config(sample("zero_data: true")), 1, tmp_path, [instance], ModelStatistics("m", "1"), Log())


async def test_without_samples_nothing_runs(tmp_path):
    instance = FakeInstance()
    await warm_up(config("batch_size: 0"), 1, tmp_path, [instance], ModelStatistics("m", "1"), Log())
    assert instance.executed == 0
