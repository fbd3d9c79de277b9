"""The models whose answers Triton has recorded load and run as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from python_backend_fakes import FakeRequest, FakeServices, context, load

from naiad.backends.python import PythonBackend
from naiad.errors import NaiadError

MODELS = Path(__file__).resolve().parents[5] / "shared" / "conformance" / "models"
FILES = sorted(MODELS.glob("*/*/*/model.py"))
pytestmark = pytest.mark.skipif(not FILES, reason="needs the recorded models beside the repository")

#: The error each that does not load gives; `{path}` is its file.
BROKEN = {
    "init_fails": "RuntimeError: cannot start\n\nAt:\n  {path}(3): initialize\n",
    "crashes": "RuntimeError: cannot start\n\nAt:\n  {path}(3): initialize\n",
    "syntax_error": "SyntaxError: expected ':' (model.py, line 2)",
}

MODES = {
    "raise": "{failed}ValueError: the model raised this\n\nAt:\n  {path}(14): execute\n",
    "raise_triton": "{failed}TritonModelException: a model exception\n\nAt:\n  {path}(16): execute\n",
    "error": "an error in the response",
    "too_few": "{failed}Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
    "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
    "too_many": "{failed}Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
    "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2\n",
    "not_a_response": "{failed}Expected an 'InferenceResponse' object in the execute function return list, found type "
    "'<class 'str'>'.",
}


def name_of(path: Path) -> str:
    return path.parent.parent.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[2].name}/{name_of(path)}/{path.parent.name}")
def test_a_model_loads_as_it_does_in_triton(path: Path) -> None:
    services = FakeServices(metric=lambda call: None)
    if name_of(path) in BROKEN:
        with pytest.raises(NaiadError) as error:
            load(path, services)
        assert error.value.triton_code == "INTERNAL"
        assert error.value.message == BROKEN[name_of(path)].format(path=path)
    else:
        load(path, services).close()


def run(model: str, *requests: FakeRequest, **config: Any) -> PythonBackend:
    path = MODELS / model / "1" / "model.py"
    backend = load(path, **config)
    backend.execute(requests)
    return backend


def test_add_sub() -> None:
    request = FakeRequest(("OUTPUT0", "OUTPUT1"), INPUT0=[5, 6], INPUT1=[1, 2])
    run("core/add_sub", request)
    assert request.values == {"OUTPUT0": [6, 8], "OUTPUT1": [4, 4]}


def test_an_output_nobody_asked_for_is_dropped() -> None:
    request = FakeRequest(("OUTPUT0",), MODE=np.array([b"unknown_output"], object))
    run("core/fails", request)
    assert request.values == {"OUTPUT0": [1, 2]}


@pytest.mark.parametrize(("mode", "text"), MODES.items())
def test_failures_read_as_in_triton(mode: str, text: str) -> None:
    request = FakeRequest(("OUTPUT0",), MODE=np.array([mode.encode()], object))
    run("core/fails", request)
    failed = "Failed to process the request(s) for model 'fails_0_0', message: "
    assert request.error == text.format(failed=failed, path=MODELS / "core/fails/1/model.py")


@pytest.mark.parametrize("mode", ["none", "return_none"])
def test_a_request_without_a_response_gets_an_error_instead_of_waiting_forever(mode: str) -> None:
    request = FakeRequest(("OUTPUT0",), MODE=np.array([mode.encode()], object))
    run("core/fails", request)
    assert "execute returned no response for a request" in request.error


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("error_code", "NOT_FOUND"),
        ("error_cancelled", "CANCELLED"),
        ("error_exists", "ALREADY_EXISTS"),
        ("error_unavailable", "UNAVAILABLE"),
        ("error_unsupported", "UNSUPPORTED"),
        ("error_invalid", "INVALID_ARG"),
        ("error_internal", "INTERNAL"),
    ],
)
def test_the_code_of_an_error_reaches_the_client(mode: str, code: str) -> None:
    request = FakeRequest(("OUTPUT0",), MODE=np.array([mode.encode()], object))
    run("core/fails", request)
    assert isinstance(request.answer, NaiadError)
    assert request.answer.triton_code == code


def test_bf16_is_not_for_numpy() -> None:
    import ml_dtypes

    request = FakeRequest(("OUTPUT0",), INPUT0=np.ones((1, 3), ml_dtypes.bfloat16))
    run("core/ident_bf16", request)
    assert request.error == (
        "Failed to process the request(s) for model 'ident_bf16_0_0', message: TritonModelException: Tensor dtype is "
        "BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead.\n\nAt:\n  "
        f"{MODELS / 'core/ident_bf16/1/model.py'}(10): execute\n"
    )


def test_a_decoupled_model_sends_as_many_responses_as_it_likes() -> None:
    request = FakeRequest(("OUT", "IDX"), IN=np.array([7, -5, 8], np.int32))
    run("text/repeat", request, model_transaction_policy={"decoupled": True})
    first, bad, second, end = request.sent
    assert first[0].outputs["OUT"].tolist() == [7]  # type: ignore[union-attr]
    assert str(bad[0]) == "negative value -5"
    assert second[0].outputs["IDX"].tolist() == [2]  # type: ignore[union-attr]
    assert end == (None, True)
    assert [final for _, final in request.sent] == [False, False, False, True]


def test_auto_completion() -> None:
    config = PythonBackend.autocomplete(context(MODELS / "core/auto_batch/1/model.py"))
    assert config is not None
    assert config["max_batch_size"] == 16
    assert config["dynamic_batching"] == {}
    assert config["input"] == [{"name": "INPUT0", "data_type": "TYPE_INT64", "dims": [-1]}]
    assert config["output"] == [{"name": "OUTPUT0", "data_type": "TYPE_INT64", "dims": [-1]}]


def test_a_model_without_auto_complete_config_changes_nothing() -> None:
    assert PythonBackend.autocomplete(context(MODELS / "core/add_sub/1/model.py")) is None
