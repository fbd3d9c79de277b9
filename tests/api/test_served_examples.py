"""The example repository, served as `naiad init --example` writes it, and those of its models whose framework is there."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from served import Repository, Server
from tritonclient.utils import InferenceServerException

from naiad import examples

pytest.importorskip("sklearn")
FRAMEWORKS = examples.installed()
CLASSIFIERS = ["digits", "digits_linear", *(model for name in FRAMEWORKS for model in examples.FRAMEWORKS[name])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    examples.write_example(repository, FRAMEWORKS)
    with Server(Repository(repository)) as server:
        yield server.started()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.ports[1]}") as client:
        yield client


@pytest.fixture(scope="module")
def unseen() -> Any:
    from naiad.examples.digits import holdout

    return holdout()


def ask(client: Any, model: str, inputs: dict[str, Any], **more: Any) -> Any:
    tensors = []
    for name, array in inputs.items():
        datatype = "BYTES" if array.dtype == object else {"f": "FP32", "i": "INT32"}[array.dtype.kind]
        tensors.append(triton.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    return client.infer(model, tensors, **more)


def in_batches(images: Any) -> Iterator[Any]:
    yield from np.array_split(images.reshape(-1, 64), 12)


def test_all_models_are_ready(client: Any) -> None:
    index = {entry.name: entry.state for entry in client.get_model_repository_index().models}
    assert index == dict.fromkeys([*examples.MODELS, *CLASSIFIERS], "READY")


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_classifiers_are_right(model: str, client: Any, unseen: Any) -> None:
    images, labels = unseen
    answers = [ask(client, model, {"IMAGE": batch}) for batch in in_batches(images)]
    found = np.concatenate([answer.as_numpy("LABEL") for answer in answers])
    probabilities = np.concatenate([answer.as_numpy("PROBABILITIES") for answer in answers])
    assert found.shape == (len(labels), 1)
    assert (found[:, 0] == labels).mean() >= (0.95 if model == "digits_linear" else 0.97)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-4)
    if model != "digits_linear":
        expected = [ask(client, "digits", {"IMAGE": batch}).as_numpy("PROBABILITIES") for batch in in_batches(images)]
        np.testing.assert_allclose(probabilities, np.concatenate(expected), atol=1e-4)


def test_the_ensemble_reads_png_files(client: Any, unseen: Any) -> None:
    from naiad.examples.digits import as_png

    images, labels = unseen
    files = np.array([[as_png(image)] for image in images[:32]], object)
    result = ask(client, "digits_from_png", {"PNG": files})
    assert (result.as_numpy("LABEL")[:, 0] == labels[:32]).mean() > 0.9
    best = triton.InferRequestedOutput("PROBABILITIES", class_count=1)
    texts = ask(client, "digits_from_png", {"PNG": files}, outputs=[best]).as_numpy("PROBABILITIES")
    names = (Path(examples.__file__).parent / "repository/digits/labels.txt").read_text().split()
    assert [text.decode().split(":")[2] for text in texts[:, 0]] == [names[n] for n in result.as_numpy("LABEL")[:, 0]]


def test_the_ensemble_refuses_what_is_no_png(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="not a PNG file") as error:
        ask(client, "digits_from_png", {"PNG": np.array([[b"GIF89a"]], object)})
    assert error.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_the_cascade_asks_the_larger_model_where_the_small_one_is_not_sure(client: Any, unseen: Any) -> None:
    images, labels = unseen
    right, asked = [], []
    for batch, expected in zip(in_batches(images), np.array_split(labels, 12), strict=True):
        result = ask(client, "digits_cascade", {"IMAGE": batch})
        small = ask(client, "digits_linear", {"IMAGE": batch}).as_numpy("PROBABILITIES")
        models = result.as_numpy("MODEL")[:, 0]
        assert ((models == b"digits") == (small.max(axis=1) < 0.8)).all()
        right += list(result.as_numpy("LABEL")[:, 0] == expected)
        asked += list(models)
    assert np.mean(right) >= 0.97
    assert set(asked) == {b"digits", b"digits_linear"}


def stream(client: Any, model: str, text: str, **inputs: Any) -> list[str]:
    answers: Queue[Any] = Queue()
    text_input = triton.InferInput("text_input", [1], "BYTES")
    text_input.set_data_from_numpy(np.array([text.encode()], object))
    tensors = [text_input]
    for name, value in inputs.items():
        tensors.append(triton.InferInput(name, [1], "INT32"))
        tensors[-1].set_data_from_numpy(np.array([value], np.int32))
    client.start_stream(lambda result, error: answers.put(error or result))
    words = []
    try:
        client.async_stream_infer(model, tensors, enable_empty_final_response=True)
        while True:
            answer = answers.get(timeout=60)
            if isinstance(answer, Exception):
                raise answer
            if answer.as_numpy("text_output") is not None:
                words.append(answer.as_numpy("text_output").item().decode())
            if answer.get_response().parameters["triton_final_response"].bool_param:
                return words
    finally:
        client.stop_stream()


def test_words_come_one_by_one(client: Any) -> None:
    assert stream(client, "words", "wörter  kommen nacheinander") == ["wörter", "kommen", "nacheinander"]
    assert stream(client, "words", "one two three", max_tokens=2) == ["one", "two"]
    assert stream(client, "words", " ") == []


def test_words_over_http(server: Server) -> None:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.ports[0]}/v2/models/words/generate_stream",
        json.dumps({"text_input": "one at a time"}).encode(),
        timeout=60,
    ) as answer:
        events = [json.loads(line[5:]) for line in answer.read().decode().splitlines() if line.startswith("data:")]
    assert [event["text_output"] for event in events] == ["one", "at", "a", "time"]


def test_sums_of_sequences_beside_each_other(client: Any) -> None:
    sums: dict[int, list[float]] = {}
    for step in range(4):
        for key in range(1, 9):
            value = np.array([[key]], np.float32)
            flags = {"sequence_start": step == 0, "sequence_end": step == 3}
            result = ask(client, "running_sum", {"VALUE": value}, sequence_id=key, **flags)
            sums.setdefault(key, []).append(result.as_numpy("SUM").item())
    assert sums == {key: [key, 2 * key, 3 * key, 4 * key] for key in range(1, 9)}
    # The id may be used again: a new sequence starts from nothing.
    value = np.array([[5]], np.float32)
    again = ask(client, "running_sum", {"VALUE": value}, sequence_id=1, sequence_start=True, sequence_end=True)
    assert again.as_numpy("SUM").item() == 5
