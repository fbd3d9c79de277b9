"""The functions and constants of `triton_python_backend_utils` that need no server."""

from types import SimpleNamespace

import numpy as np
import pytest

from naiad.backends.python import pb_utils
from naiad.backends.python.pb_utils import InferenceResponse, Tensor, TritonError

NUMPY = [
    ("TYPE_BOOL", 1, np.bool_),
    ("TYPE_UINT8", 2, np.uint8),
    ("TYPE_UINT16", 3, np.uint16),
    ("TYPE_UINT32", 4, np.uint32),
    ("TYPE_UINT64", 5, np.uint64),
    ("TYPE_INT8", 6, np.int8),
    ("TYPE_INT16", 7, np.int16),
    ("TYPE_INT32", 8, np.int32),
    ("TYPE_INT64", 9, np.int64),
    ("TYPE_FP16", 10, np.float16),
    ("TYPE_FP32", 11, np.float32),
    ("TYPE_FP64", 12, np.float64),
    ("TYPE_STRING", 13, np.object_),
]


@pytest.mark.parametrize(("name", "number", "numpy"), NUMPY)
def test_names_and_numbers_of_data_types(name: str, number: int, numpy: type) -> None:
    assert np.dtype(pb_utils.triton_string_to_numpy(name)) == np.dtype(numpy)
    assert pb_utils.TRITON_STRING_TO_NUMPY[name] is pb_utils.triton_string_to_numpy(name)
    assert pb_utils.triton_to_numpy_type(number) is numpy
    assert pb_utils.numpy_to_triton_type(numpy) == number
    assert pb_utils.numpy_to_triton_type(np.dtype(numpy)) == number


def test_types_numpy_or_triton_does_not_have() -> None:
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.triton_to_numpy_type(99) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")


def test_packed_bytes() -> None:
    packed = b"\x01\x00\x00\x00a\x02\x00\x00\x00bc\x01\x00\x00\x007"
    assert pb_utils.serialize_byte_tensor(np.array([[b"a"], ["bc"], [7]], object)) == packed
    assert pb_utils.serialize_byte_tensor(np.array([b"a", b"bc", b"7"])) == packed
    assert pb_utils.serialize_byte_tensor(np.array([], object)) == ()
    assert pb_utils.serialize_byte_tensor(np.array([1])) is None
    unpacked = pb_utils.deserialize_bytes_tensor(packed)
    assert unpacked.dtype == object
    assert unpacked.tolist() == [b"a", b"bc", b"7"]
    assert pb_utils.deserialize_bytes_tensor(b"").shape == (0,)


def test_parts_of_a_configuration_by_name() -> None:
    config = {"input": [{"name": "X"}], "output": [{"name": "Y"}], "model_transaction_policy": {"decoupled": True}}
    assert pb_utils.get_input_config_by_name(config, "X") == {"name": "X"}
    assert pb_utils.get_input_config_by_name(config, "Y") is None
    assert pb_utils.get_output_config_by_name(config, "Y") == {"name": "Y"}
    assert pb_utils.get_output_config_by_name({}, "Y") is None
    assert pb_utils.using_decoupled_model_transaction_policy(config)
    assert not pb_utils.using_decoupled_model_transaction_policy({})


def test_constants() -> None:
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START == 1
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END == 2
    assert pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE == 2


def test_errors_have_a_code() -> None:
    assert TritonError("x").code() == TritonError.INTERNAL
    error = TritonError("x", TritonError.CANCELLED)
    assert (error.message(), error.code().name) == ("x", "CANCELLED")
    assert TritonError(message="x", code=TritonError.UNKNOWN).code() == 0
    assert repr(error) == "<TritonError CANCELLED: x>"
    with pytest.raises(TypeError, match="TritonError needs a str as its message, got <class 'ValueError'>"):
        TritonError(ValueError("x"))  # type: ignore[arg-type]


def test_responses() -> None:
    tensor = Tensor("X", np.zeros(1))
    response = InferenceResponse(output_tensors=[tensor], parameters={"a": 1, "b": "c"})
    assert response.output_tensors() == [tensor]
    assert response.parameters() == '{"a":1,"b":"c"}'
    assert not response.has_error()
    failed = InferenceResponse(error=TritonError("x"))
    assert failed.has_error()
    assert failed.output_tensors() == []
    with pytest.raises(TypeError, match=r"needs a list of Tensor objects, got one of <class 'numpy\.ndarray'>"):
        InferenceResponse([np.zeros(1)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="needs a TritonError as its error, got <class 'str'>"):
        InferenceResponse(error="x")


def test_models_may_have_classes_of_their_own() -> None:
    class Scores(Tensor):
        def __init__(self, values: list[float]) -> None:
            super().__init__("SCORES", np.array(values, np.float32))
            self.best = max(values)

        def name(self) -> str:
            return "S"

    class Answer(InferenceResponse):
        pass

    class Trouble(TritonError):
        def message(self) -> str:
            return "trouble"

    scores = Scores([1, 3, 2])
    assert scores.best == 3
    assert pb_utils.get_output_tensor_by_name(Answer([scores]), "S") is scores
    assert scores.as_numpy().tolist() == [1, 3, 2]
    error = Answer(error=Trouble("x", np.int64(3))).error()
    assert error is not None
    assert (error.message(), error.code()) == ("trouble", TritonError.INVALID_ARG)


def test_a_tensor_is_found_in_what_models_are_tested_with() -> None:
    tensor = SimpleNamespace(name=lambda: "X")
    request = SimpleNamespace(inputs=lambda: [SimpleNamespace(name=lambda: "W"), tensor])
    assert pb_utils.get_input_tensor_by_name(request, "X") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "Y") is None


@pytest.mark.parametrize("level", [None, 1])
def test_a_log_level_is_a_log_level(level: object) -> None:
    with pytest.raises(TypeError):
        pb_utils.Logger.log("text", level)  # type: ignore[arg-type]
