"""TensorFlow's models in a server: what unloading gives back, environments, and what is said where it is missing."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from served import Server, error_of, put, until

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
MIB = 1 << 20
#: A model with 16 MiB of weights, so that a leak would show.
WEIGHTS = 4 * MIB
ROUNDS = 20

needs_tensorflow = pytest.mark.skipif(not HAS_TENSORFLOW, reason="tensorflow not installed")


def write_saved_model(folder: Path) -> None:
    """y = x * the sum of all weights, which is 1."""
    import tensorflow as tf

    module = tf.Module()
    module.weights = tf.Variable(tf.fill([WEIGHTS], 1 / WEIGHTS))
    function = tf.function(
        lambda x: {"OUT": x * tf.reduce_sum(module.weights)},
        input_signature=[tf.TensorSpec([None, 2], tf.float32, "IN")],
    )
    path = folder / "1" / "model.savedmodel"
    tf.saved_model.save(module, str(path), signatures=function.get_concrete_function())


def resident(server: Server) -> int:
    """Bytes that all its processes occupy, shared ones counted once."""
    total = 0
    for pid in server.pids():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


@needs_tensorflow
def test_unloading_gives_memory_back(explicit: Any, name: str) -> None:
    write_saved_model(explicit.repository.path / name)
    x = np.array([[1, 2]], np.float32)
    after: list[int] = []
    for _ in range(ROUNDS):
        explicit.http.load(name)
        np.testing.assert_allclose(explicit.http.infer(name, "IN", x), x, rtol=1e-3)
        explicit.http.unload(name)
        until(lambda: not explicit.named(f"naiad:{name}"), "the host has ended")
        after.append(resident(explicit))
    print([size // MIB for size in after])
    # The first rounds fill what caches there are.
    assert max(after[-3:]) - max(after[2:5]) < 8 * MIB, [size // MIB for size in after]


@pytest.mark.skipif(HAS_TENSORFLOW, reason="tensorflow is installed")
def test_without_tensorflow_the_model_says_what_to_install_and_others_load(explicit: Any, name: str) -> None:
    (explicit.repository.path / name / "1" / "model.savedmodel").mkdir(parents=True)
    explicit.repository.doer(f"{name}d")
    assert "pip install 'naiad[tensorflow]'" in error_of(explicit.http.load, name)
    assert "pip install 'naiad[tensorflow]'" in explicit.http.index()[name, "1"][1]
    explicit.http.load(f"{name}d")
    assert explicit.http.do(f"{name}d") == f"{name}d 1"


@needs_tensorflow
def test_sequences_have_controls_and_state(explicit: Any, name: str) -> None:
    """A running sum that the server keeps, begun anew where a sequence begins."""
    import tensorflow as tf

    def step(value: Any, start: Any, state: Any) -> Any:
        total = value + state * (1 - start)
        return {"SUM": total, "STATE_OUT": total}

    names = ("VALUE", "START", "STATE_IN")
    specs = [tf.TensorSpec([None, 1], tf.float32, name) for name in names]
    path = explicit.repository.path / name / "1" / "model.savedmodel"
    tf.saved_model.save(
        tf.Module(), str(path), signatures=tf.function(step, input_signature=specs).get_concrete_function()
    )
    put(
        explicit.repository.path / name / "config.pbtxt",
        """
        max_batch_size: 4
        instance_group [ { kind: KIND_CPU count: 1 } ]
        sequence_batching {
          control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]
          state [ { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ]
                    initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } ]
        }
        """,
    )
    explicit.http.load(name)
    config = explicit.http.config(name)
    assert [tensor["name"] for tensor in config["input"]] == ["VALUE"]
    assert [tensor["name"] for tensor in config["output"]] == ["SUM"]
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{explicit.ports[0]}")
    sums = []
    for sequence, value, start, end in [
        (1, 1, True, False),
        (2, 10, True, False),
        (1, 2, False, False),
        (2, 20, False, True),
        (1, 3, False, True),
    ]:
        tensor = tritonclient.http.InferInput("VALUE", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        answer = client.infer(name, [tensor], sequence_id=sequence, sequence_start=start, sequence_end=end)
        sums.append(answer.as_numpy("SUM").item())
    assert sums == [1, 10, 3, 30, 6]
