"""Calls of other models, and of the server, from a model."""

import enum
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from python_backend_fakes import FakeRequest, FakeServices, load, write

from naiad.backends.python import calls, current, pb_utils
from naiad.backends.python.calls import ErrorValue, InferAnswer, InferCall, StreamAnswer, StreamCall, TensorValue
from naiad.backends.python.pb_utils import InferenceRequest, InferenceResponse, Tensor
from naiad.errors import InvalidArgument, NotFound, Unavailable


def encoded(answer: Any, kind: Any) -> Any:
    """What arrives of a message that has been on a socket."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=kind)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    """Those of an instance that serves."""
    services = FakeServices()
    call = services.call
    monkeypatch.setattr(services, "call", lambda *asked: encoded(call(*asked), asked[2]))
    instance = current.Instance("m_0_0", services, Path("/m/1"))
    instance.is_serving = True
    monkeypatch.setattr(current, "_instance", instance)
    return services


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), np.int8),
        np.array(3, np.int64),
        np.array([[b"a", b"\x00bc"]], object),
        np.array([True, False]),
        np.array([1, 2], ml_dtypes.bfloat16),
    ],
    ids=["float", "empty", "scalar", "bytes", "bool", "bf16"],
)
def test_tensors_arrive_as_they_were_sent(services: FakeServices, array: np.ndarray) -> None:
    services.answers["infer"] = lambda call: InferAnswer(call.inputs)
    answer = InferenceRequest(model_name="n", inputs=[Tensor("X", array)], requested_output_names=["X"]).exec()
    assert isinstance(answer, InferenceResponse)
    assert not answer.has_error()
    assert answer.error() is None
    (tensor,) = answer.output_tensors()
    assert tensor.name() == "X"
    assert tensor._array is not None
    assert tensor._array.dtype == array.dtype
    assert tensor._array.shape == array.shape
    assert tensor._array.tolist() == array.tolist()
    assert tensor._array.flags.writeable
    assert pb_utils.get_output_tensor_by_name(answer, "X") is tensor
    assert pb_utils.get_output_tensor_by_name(answer, "Z") is None


def test_everything_of_a_request_arrives(services: FakeServices) -> None:
    services.answers["infer"] = lambda call: InferAnswer(parameters={"a": 0.5})
    request = InferenceRequest(
        model_name="n",
        model_version=3,
        inputs=[Tensor("X", np.array([7], np.uint8))],
        requested_output_names=["Y", "Z", "Y"],
        request_id="r",
        correlation_id="s",
        flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
        timeout=5,
        parameters={"k": True},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        trace=pb_utils.InferenceTrace(),
    )
    answer = request.exec()
    assert isinstance(answer, InferenceResponse)
    assert answer.parameters() == '{"a":0.5}'
    ((method, call),) = services.asked
    assert method == "infer"
    assert msgspec.structs.replace(call, inputs=()) == InferCall(
        model_name="n",
        model_version=3,
        inputs=(),
        outputs=("Y", "Z"),
        request_id="r",
        correlation_id="s",
        flags=1,
        timeout_us=5,
        parameters={"k": True},
    )
    (tensor,) = call.inputs
    assert (tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) == ("X", 2, (1,), b"\x07")
    assert encoded(call, InferCall) == call


class Name(str, enum.Enum):  # noqa: UP042
    """Not a StrEnum: str() of a member is "Name.X"."""

    X = "X"


@pytest.mark.parametrize("text", [np.str_, str.encode, lambda text: bytearray(text, "utf-8")])
def test_names_may_be_elements_of_a_tensor(services: FakeServices, text: Any) -> None:
    answers = {"infer": InferAnswer(), "load_model": None, "unload_model": None, "is_model_ready": True}
    services.answers |= {method: lambda _, answer=answer: answer for method, answer in answers.items()}
    InferenceRequest(
        model_name=text("ñ"),
        inputs=[Tensor(text("X"), np.zeros(1))],
        requested_output_names=[text("Y")],
        request_id=text("r"),
        parameters={np.str_("k"): np.str_("v")},
        correlation_id=np.str_("s"),
    ).exec()
    pb_utils.load_model(text("n"), text("{}"))
    pb_utils.unload_model(text("n"))
    assert pb_utils.is_model_ready(text("n"))
    asked = [msgspec.msgpack.decode(msgspec.msgpack.encode(call)) for _, call in services.asked]
    assert {key: asked[0][key] for key in ("model_name", "outputs", "request_id", "correlation_id", "parameters")} == {
        "model_name": "ñ",
        "outputs": ["Y"],
        "request_id": "r",
        "correlation_id": "s",
        "parameters": {"k": "v"},
    }
    assert asked[0]["inputs"][0]["name"] == "X"
    assert [call["name"] for call in asked[1:]] == ["n"] * 3
    assert asked[1]["config"] == "{}"
    assert pb_utils.TritonError(text("m")).message() == "m"
    assert Tensor(Name.X, np.zeros(1)).name() == "X"


def test_what_is_no_text_is_no_name() -> None:
    for more in ({"model_name": 3}, {"model_name": "n", "request_id": None}):
        with pytest.raises(TypeError, match="InferenceRequest needs a str as"):
            InferenceRequest(inputs=[], requested_output_names=["Y"], **more)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="each of requested_output_names, got <class 'int'>"):
        InferenceRequest(inputs=[], requested_output_names=b"Y", model_name="n")  # type: ignore[arg-type]


def test_a_request_can_be_asked_for_what_it_was_made_of() -> None:
    request = InferenceRequest("r", 5, [Tensor("X", np.zeros(1))], ["Y"], "n", flags=1, timeout=3, parameters={"a": 1})
    assert request.request_id() == "r"
    assert request.correlation_id() == 5
    assert [tensor.name() for tensor in request.inputs()] == ["X"]
    assert request.requested_output_names() == {"Y"}
    assert (request.flags(), request.timeout(), request.parameters()) == (1, 3, '{"a": 1}')
    assert not request.is_cancelled()
    with pytest.raises(pb_utils.TritonModelException, match="has no reference to the decoupled state"):
        request.get_response_sender()


@pytest.mark.parametrize(
    ("argument", "least", "most"),
    [
        ("correlation_id", 0, 2**64 - 1),
        ("flags", 0, 2**32 - 1),
        ("timeout", 0, 2**64 - 1),
        ("model_version", -(2**63), 2**63 - 1),
    ],
)
def test_numbers_of_a_request_are_as_large_as_those_of_triton(argument: str, least: int, most: int) -> None:
    def made(value: Any) -> InferenceRequest:
        return InferenceRequest(inputs=[], requested_output_names=[], model_name="n", **{argument: value})

    for number in least, most, True:
        made(number)
    for number in least - 1, most + 1:
        with pytest.raises(TypeError, match=f"^InferenceRequest takes {least} to {most} as {argument}, got {number}$"):
            made(number)


def test_a_correlation_id_may_be_a_bool(services: FakeServices) -> None:
    services.answers["infer"] = lambda call: InferAnswer()
    InferenceRequest(model_name="n", inputs=[], requested_output_names=[], correlation_id=True).exec()
    ((_, call),) = services.asked
    assert encoded(call, InferCall).correlation_id == 1


def test_what_no_request_can_carry_is_answered_with_an_error(services: FakeServices) -> None:
    for more, text in (
        ({"model_version": -2}, "Failed for execute the inference request. Model 'n' is not ready."),
        ({"parameters": {"a": 2**63}}, "Unsupported value type on parameters"),
        ({"parameters": {"a": -(2**63) - 1}}, "Unsupported value type on parameters"),
    ):
        answer = InferenceRequest(model_name="n", inputs=[], requested_output_names=[], **more).exec()  # type: ignore[arg-type]
        assert isinstance(answer, InferenceResponse)
        assert answer.error().message() == f"Model n - Error when running inference: {text}"  # type: ignore[union-attr]


def test_what_is_no_request() -> None:
    with pytest.raises(
        pb_utils.TritonModelException,
        match=r"^Input tensor for request with id 'r' and model name 'n' should not be empty\.$",
    ):
        InferenceRequest(request_id="r", model_name="n", inputs=[None], requested_output_names=[])  # type: ignore[list-item]
    with pytest.raises(
        pb_utils.TritonModelException,
        match=r"^Requested output name for request with id '' and model name 'n' should not be empty\.$",
    ):
        InferenceRequest(model_name="n", inputs=[], requested_output_names=[""])
    with pytest.raises(pb_utils.TritonModelException, match=r"^Correlation ID must be integer or string$"):
        InferenceRequest(model_name="n", inputs=[], requested_output_names=[], correlation_id=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs inputs, requested_output_names and model_name"):
        InferenceRequest(model_name="n", inputs=[])
    with pytest.raises(TypeError, match="list of requested_output_names"):
        InferenceRequest(model_name="n", inputs=[], requested_output_names="Y")


def refuse(call: InferCall) -> InferAnswer:
    raise NotFound(calls.not_ready(call.model_name))


def test_a_refused_call_is_a_response_with_an_error(services: FakeServices) -> None:
    services.answers["infer"] = refuse
    request = InferenceRequest(model_name="n", inputs=[], requested_output_names=[])
    text = "Model n - Error when running inference: Failed for execute the inference request. Model 'n' is not ready."
    answer = request.exec()
    assert isinstance(answer, InferenceResponse)
    assert answer.has_error()
    error = answer.error()
    assert error is not None
    assert error.message() == text
    assert error.code() == pb_utils.TritonError.INTERNAL
    (only,) = request.exec(decoupled=True)
    assert only.error().message() == text


def test_an_error_of_the_called_model_keeps_text_and_code(services: FakeServices) -> None:
    services.answers["infer"] = lambda call: InferAnswer(error=ErrorValue("UNAVAILABLE", "later"))
    answer = InferenceRequest(model_name="n", inputs=[], requested_output_names=[]).exec()
    assert isinstance(answer, InferenceResponse)
    error = answer.error()
    assert error is not None
    assert (error.message(), error.code()) == ("later", pb_utils.TritonError.UNAVAILABLE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"requested_output_names": [None]},
        *({name: None} for name in ("correlation_id", "flags", "inputs", "model_name", "model_version", "request_id")),
    ],
)
def test_arguments_of_a_wrong_type_are_type_errors(services: FakeServices, wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"model_name": "n", "inputs": [], "requested_output_names": []}
    with pytest.raises(TypeError):
        InferenceRequest(**{**right, **wrong})


def test_numbers_may_be_numpys(services: FakeServices) -> None:
    services.answers["infer"] = lambda call: InferAnswer()
    numbers = {"model_version": np.int64(2), "flags": np.uint32(1), "timeout": np.uint64(7)}
    answer = InferenceRequest(model_name="n", inputs=(), requested_output_names=("Y",), **numbers).exec(np.bool_(False))
    assert isinstance(answer, InferenceResponse)
    assert not answer.has_error()
    ((_, call),) = services.asked
    assert (call.model_version, call.flags, call.timeout_us, call.decoupled) == (2, 1, 7, False)
    assert {type(number) for number in (call.model_version, call.flags, call.timeout_us)} == {int}


def answers_of_a_stream(count: int) -> list[InferAnswer]:
    value = TensorValue("Y", 8, (1,), memoryview(np.array([4], np.int32).tobytes()))
    return [InferAnswer((value,), final=False) for _ in range(count)] + [InferAnswer()]


def test_a_decoupled_call_gives_responses_as_they_come_and_again(services: FakeServices) -> None:
    left = answers_of_a_stream(2)
    services.answers["infer"] = lambda call: StreamAnswer(9)
    services.answers["next_response"] = lambda call: left.pop(0)
    responses = InferenceRequest(model_name="n", inputs=[], requested_output_names=[]).exec(decoupled=True)
    first = next(responses)  # type: ignore[arg-type]
    assert first.output_tensors()[0].as_numpy().tolist() == [4]
    rest = list(responses)  # type: ignore[arg-type]
    assert [len(response.output_tensors()) for response in rest] == [1, 0]
    assert [len(response.output_tensors()) for response in responses] == [1, 1, 0]  # type: ignore[union-attr]
    assert services.asked[0][1].decoupled
    assert services.asked[1:] == [("next_response", StreamCall(9))] * 3


def test_a_decoupled_call_can_be_cancelled_until_it_is_over(services: FakeServices) -> None:
    left = answers_of_a_stream(1)
    services.answers["infer"] = lambda call: StreamAnswer(9)
    services.answers["next_response"] = lambda call: left.pop(0)
    services.answers["cancel"] = lambda call: None
    responses = InferenceRequest(model_name="n", inputs=[], requested_output_names=[]).exec(decoupled=True)
    assert isinstance(responses, pb_utils.ResponseIterator)
    responses.cancel()
    list(responses)
    responses.cancel()
    assert [method for method, _ in services.asked] == ["infer", "next_response", "cancel", "next_response"]


def test_a_stream_that_breaks_ends_with_the_error(services: FakeServices) -> None:
    def broken(call: StreamCall) -> InferAnswer:
        raise Unavailable("the server has ended")

    services.answers["infer"] = lambda call: StreamAnswer(9)
    services.answers["next_response"] = broken
    (only,) = InferenceRequest(model_name="n", inputs=[], requested_output_names=[]).exec(decoupled=True)
    assert only.error().message() == "the server has ended"


def test_a_stream_nobody_reads_to_its_end_is_emptied(services: FakeServices) -> None:
    left = answers_of_a_stream(2)
    empty = threading.Event()

    def next_response(call: StreamCall) -> InferAnswer:
        answer = left.pop(0)
        if not left:
            empty.set()
        return answer

    services.answers["infer"] = lambda call: StreamAnswer(9)
    services.answers["next_response"] = next_response
    InferenceRequest(model_name="n", inputs=[], requested_output_names=[]).exec(decoupled=True)
    assert empty.wait(10)


async def test_a_coroutine_waits_for_the_first_response_of_a_decoupled_call(services: FakeServices) -> None:
    left = answers_of_a_stream(1)
    services.answers["infer"] = lambda call: StreamAnswer(9)
    services.answers["next_response"] = lambda call: left.pop(0)
    request = InferenceRequest(model_name="n", inputs=[], requested_output_names=[])
    responses = await request.async_exec(decoupled=True)
    assert services.asked[1:] == [("next_response", StreamCall(9))]
    assert [len(response.output_tensors()) for response in responses] == [1, 0]  # type: ignore[union-attr]


async def test_calls_in_coroutines(services: FakeServices) -> None:
    services.answers["infer"] = lambda call: InferAnswer(call.inputs)
    request = InferenceRequest(model_name="n", inputs=[Tensor("X", np.zeros(2))], requested_output_names=["X"])
    answer = await request.async_exec()
    assert isinstance(answer, InferenceResponse)
    assert answer.output_tensors()[0].shape() == [2]


SOURCE = """
class TritonPythonModel:
    def {function}(self, {argument}):
        pb_utils.InferenceRequest(model_name="n", inputs=[], requested_output_names=[]).exec()
"""


def test_there_are_no_calls_in_initialize(tmp_path: Path) -> None:
    path = write(tmp_path, SOURCE.format(function="initialize", argument="args"))
    with pytest.raises(
        Exception, match=r"^TritonModelException: BLS is only supported during the 'execute' function\."
    ):
        load(path)


def test_there_are_no_calls_in_finalize(tmp_path: Path) -> None:
    services = FakeServices(infer=lambda call: InferAnswer())
    load(write(tmp_path, SOURCE.format(function="finalize", argument="*args")), services).close()
    assert "BLS is only supported during the 'execute' function." in services.logged[0][1]


def test_a_received_request_cannot_be_executed(tmp_path: Path) -> None:
    path = write(tmp_path, "class TritonPythonModel:\n    def execute(self, requests):\n        requests[0].exec()\n")
    request = FakeRequest()
    load(path).execute([request])
    assert "Make an InferenceRequest with its inputs." in request.error


def test_control_of_models(services: FakeServices) -> None:
    services.answers |= {
        "load_model": lambda call: None,
        "unload_model": lambda call: None,
        "is_model_ready": lambda call: call.version == 2,
    }
    pb_utils.load_model("n")
    pb_utils.load_model(model_name="n", config="{}", files={"file:1/model.py": b"x"})
    pb_utils.unload_model("n", unload_dependents=True)
    for version in "2", b"2", " +2_0", "2x":
        assert pb_utils.is_model_ready("n", version)  # type: ignore[arg-type]
    assert not pb_utils.is_model_ready("n")
    assert services.asked == [
        ("load_model", calls.LoadCall("n")),
        ("load_model", calls.LoadCall("n", "{}", {"file:1/model.py": b"x"})),
        ("unload_model", calls.UnloadCall("n", True)),
        *[("is_model_ready", calls.ReadyCall("n", 2))] * 4,
        ("is_model_ready", calls.ReadyCall("n", -1)),
    ]


def test_control_of_models_that_fails(services: FakeServices) -> None:
    def refused(call: Any) -> None:
        raise InvalidArgument("no")

    services.answers |= {"load_model": refused, "unload_model": refused, "is_model_ready": refused}
    process = "Failed to process the request for model 'm_0_0', message: "
    for act, text in (
        (lambda: pb_utils.load_model("n"), f"Failed to load model: {process}no"),
        (lambda: pb_utils.unload_model("n"), f"Failed to unload model: {process}no"),
        (lambda: pb_utils.is_model_ready("n"), f"Failed to check model readiness: {process}no"),
        (
            lambda: pb_utils.load_model("n", files=["x"]),  # type: ignore[arg-type]
            "failed to load model 'n', files should be a dictionary of file paths and file contents",
        ),
        (
            lambda: pb_utils.is_model_ready("n", "x"),
            f"Failed to check model readiness: {process}failed to get model version from specified version string 'x' "
            "(details: stol), version should be an integral value > 0",
        ),
        (
            lambda: pb_utils.is_model_ready("n", f"{2**63}"),
            f"Failed to check model readiness: {process}failed to get model version from specified version string "
            "'9223372036854775808' (details: stol), version should be an integral value > 0",
        ),
        (
            lambda: pb_utils.is_model_ready("n", "-2"),
            f"Failed to check model readiness: {process}failed to get model version from specified version string "
            "'-2', version should be an integral value > 0",
        ),
    ):
        with pytest.raises(pb_utils.TritonModelException) as error:
            act()
        assert str(error.value) == text
