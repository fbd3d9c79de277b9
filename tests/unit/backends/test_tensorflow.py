"""What is special about the backend tensorflow: each parameter by its effect. What it shares is in tests/backends."""

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from naiad.backends.api import ConfigDict, InstanceContext, ModelContext
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable

tf = pytest.importorskip("tensorflow")

from tensorflow.python.ops import control_flow_ops  # noqa: E402
from tensorflow.python.saved_model import loader_impl  # noqa: E402

from naiad.backends.tensorflow import TensorflowBackend, options  # noqa: E402
from naiad.backends.tensorflow.graphs import _MOST_CALLS, GraphSession  # noqa: E402

v1 = tf.compat.v1
CPU = InstanceContext("m_0_0", "KIND_CPU")
GPU = InstanceContext("m_0_0", "KIND_GPU", 0)
SAVED_MODEL, GRAPH_DEF = "tensorflow_savedmodel", "tensorflow_graphdef"
X = np.array([1, 2, 3, 4], np.float32)


class Services:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, level: str, message: str, file: str, line: int) -> None:
        self.lines.append(message)

    def call(self, method: str, arguments: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def services() -> Services:
    return Services()


Context = Callable[..., ModelContext]


@pytest.fixture
def context(tmp_path: Path, services: Services) -> Context:
    def make(
        file_format: str, write: Callable[[Path], None], settings: dict[str, str] | None = None, /, **config: Any
    ) -> ModelContext:
        directory = tmp_path / "m"
        path = directory / "1" / f"model.{file_format.removeprefix('tensorflow_')}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        made: ConfigDict = {"name": "m", "platform": file_format, "backend": "tensorflow"} | config
        return ModelContext("m", 1, directory, directory / "1", path, made, settings or {}, services)

    return make


def tensor(name: str, *dims: int, data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims), **more}


def parameters(**values: str) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": value} for key, value in values.items()}}


def graph(build: Callable[[], object]) -> Callable[[Path], None]:
    """Writes the graph that `build` makes as a GraphDef."""

    def write(path: Path) -> None:
        with tf.Graph().as_default() as made:
            build()
        path.write_bytes(made.as_graph_def().SerializeToString())

    return write


def functions(**signatures: tuple[Callable[..., Any], list[Any]]) -> Callable[[Path], None]:
    """Writes functions as a SavedModel of TensorFlow 2."""

    def write(path: Path) -> None:
        made = {
            name: tf.function(function, input_signature=specs).get_concrete_function()
            for name, (function, specs) in signatures.items()
        }
        tf.saved_model.save(tf.Module(), str(path), signatures=made)

    return write


def times(factor: float) -> tuple[Callable[..., Any], list[Any]]:
    return lambda x: {"y": x * factor}, [tf.TensorSpec([None, 4], tf.float32, "x")]


def old_saved_model(*tags: set[str], initialise: bool = True) -> Callable[[Path], None]:
    """Writes a SavedModel of TensorFlow 1: y = x * (number of the tag set, from 2), from a variable."""

    def write(path: Path) -> None:
        builder = v1.saved_model.Builder(str(path))
        for number, names in enumerate(tags):
            with tf.Graph().as_default(), v1.Session() as session:
                x = v1.placeholder(tf.float32, [None, 4], "in")
                factor = v1.get_variable("factor", initializer=float(number + 2), use_resource=True)
                y = tf.identity(x * factor, "out")
                session.run(v1.global_variables_initializer())
                signature = v1.saved_model.predict_signature_def({"x": x}, {"y": y})
                add = builder.add_meta_graph if number else builder.add_meta_graph_and_variables
                add(*([] if number else [session]), sorted(names), signature_def_map={"serving_default": signature})
        builder.save()

    return write


BATCH: dict[str, Any] = {"max_batch_size": 8, "input": [tensor("x", 4)], "output": [tensor("y", 4)]}
TWICE = functions(serving_default=times(2))


def twice() -> None:
    tf.multiply(v1.placeholder(tf.float32, [None, 4], "x"), 2.0, name="y")


def answer(backend: TensorflowBackend, **inputs: Any) -> Any:
    return backend.run(inputs or {"x": X.reshape(1, 4)}, ["y"])["y"]


# --- which graph, which signature -----------------------------------------------------------------------------------


def test_a_platform_that_is_none_of_tensorflow_s_is_refused(context: Context) -> None:
    with pytest.raises(InvalidArgument) as refused:
        TensorflowBackend(context("tensorflow_lite", TWICE, **BATCH), CPU)
    assert refused.value.message == "platform tensorflow_lite not supported for TensorFlow model 'm'"


@pytest.mark.parametrize("platform", [SAVED_MODEL, GRAPH_DEF])
def test_a_missing_model_is_named_with_its_instance(platform: str, context: Context) -> None:
    made = context(platform, lambda path: None, **BATCH)
    assert TensorflowBackend.autocomplete(made) is None
    with pytest.raises(Unavailable) as missing:
        TensorflowBackend(made, CPU)
    assert missing.value.message == f"unable to find '{made.path}' for model instance 'm_0_0'"


def test_the_signature_is_chosen_by_parameter(context: Context) -> None:
    both = functions(serving_default=times(2), other=times(3))
    assert answer(TensorflowBackend(context(SAVED_MODEL, both, **BATCH), CPU)).tolist() == [[2, 4, 6, 8]]
    other = context(SAVED_MODEL, both, **BATCH, **parameters(TF_SIGNATURE_DEF="other"))
    assert answer(TensorflowBackend(other, CPU)).tolist() == [[3, 6, 9, 12]]
    with pytest.raises(Internal) as missing:
        TensorflowBackend(context(SAVED_MODEL, both, **BATCH, **parameters(TF_SIGNATURE_DEF="third")), CPU)
    assert missing.value.message == (
        "unable to load model 'm', expected 'third' signature; signatures there are 'other', 'serving_default'"
    )


def test_without_the_default_signature_another_one_serves(context: Context, services: Services) -> None:
    made = context(SAVED_MODEL, functions(other=times(3)), **BATCH)
    assert answer(TensorflowBackend(made, CPU)).tolist() == [[3, 6, 9, 12]]
    assert "model 'm' has no signature 'serving_default', using signature 'other'" in services.lines


def test_the_graph_is_chosen_by_tag(context: Context) -> None:
    write = old_saved_model({"serve"}, {"train"})
    assert answer(TensorflowBackend(context(SAVED_MODEL, write, **BATCH), CPU)).tolist() == [[2, 4, 6, 8]]
    with pytest.raises(Internal) as missing:
        TensorflowBackend(context(SAVED_MODEL, write, **BATCH, **parameters(TF_GRAPH_TAG="tpu")), CPU)
    assert missing.value.message == "unable to load model 'm', expected 'tpu' tag"


def test_a_tag_of_several_is_found(context: Context) -> None:
    made = context(SAVED_MODEL, old_saved_model({"gpu", "eval"}), **BATCH, **parameters(TF_GRAPH_TAG="eval"))
    assert answer(TensorflowBackend(made, CPU)).tolist() == [[2, 4, 6, 8]]


def test_graphs_of_other_tags_have_their_own_operations(context: Context) -> None:
    """The second graph shares the variables of the first and does something else with them."""

    def write(path: Path) -> None:
        builder = v1.saved_model.Builder(str(path))
        for tag, offset in (("serve", 0.0), ("plus", 100.0)):
            with tf.Graph().as_default(), v1.Session() as session:
                x = v1.placeholder(tf.float32, [None, 4], "in")
                y = x + offset
                signature = v1.saved_model.predict_signature_def({"x": x}, {"y": y})
                v1.get_variable("unused", initializer=1.0, use_resource=True)
                session.run(v1.global_variables_initializer())
                if tag == "serve":
                    builder.add_meta_graph_and_variables(session, [tag], {"serving_default": signature})
                else:
                    builder.add_meta_graph([tag], {"serving_default": signature})
        builder.save()

    made = context(SAVED_MODEL, write, **BATCH, **parameters(TF_GRAPH_TAG="plus"))
    assert answer(TensorflowBackend(made, CPU)).tolist() == [[101, 102, 103, 104]]


def test_a_file_is_read_once(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    made = context(SAVED_MODEL, TWICE, **BATCH)
    read: list[str] = []
    parse = loader_impl.parse_saved_model
    monkeypatch.setattr(loader_impl, "parse_saved_model", lambda path: (read.append(path), parse(path))[1])
    TensorflowBackend(made, CPU)
    assert read == [str(made.path)]


def test_a_frozen_model_still_lists_its_variables(context: Context, services: Services) -> None:
    """The values are constants of the graph, their file is gone; what would restore them is still there."""

    def write(path: Path) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 4], "in")
            v1.get_variable("unused", initializer=1.0, use_resource=True)
            session.run(v1.global_variables_initializer())
            v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": x * 2.0})
        shutil.rmtree(path / "variables")

    assert answer(TensorflowBackend(context(SAVED_MODEL, write, **BATCH), CPU)).tolist() == [[2, 4, 6, 8]]
    assert "the SavedModel of 'm' has no variables, none were restored" in services.lines


def test_keras_models_serve_as_exported(context: Context) -> None:
    keras = pytest.importorskip("keras")
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1), name="image"),
            keras.layers.Conv2D(3, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    made = context(SAVED_MODEL, lambda path: model.export(str(path), verbose=False))
    complete = TensorflowBackend.autocomplete(made)
    assert complete is not None
    assert complete["max_batch_size"] == 4
    assert complete["input"] == [tensor("image", 6, 6, 1)]
    backend = TensorflowBackend(context(SAVED_MODEL, lambda path: None, **complete), CPU)
    images = np.random.default_rng(0).random((3, 6, 6, 1), np.float32)
    (output,) = (it["name"] for it in complete["output"])
    np.testing.assert_allclose(backend.run({"image": images}, [output])[output], model(images), rtol=1e-5)


def test_tables_and_assets_come_with_the_model(context: Context, tmp_path: Path) -> None:
    """A vocabulary in a file of the SavedModel: strings in, numbers out."""
    words = tmp_path / "words.txt"
    words.write_text("zero\none\n")

    class Vocabulary(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            initializer = tf.lookup.TextFileInitializer(
                str(words), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
            )
            self.table = tf.lookup.StaticHashTable(initializer, -1)

        @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.string, "x")])  # type: ignore[untyped-decorator]
        def look_up(self, x: Any) -> Any:
            return {"y": self.table.lookup(x)}

    def write(path: Path) -> None:
        module = Vocabulary()
        tf.saved_model.save(module, str(path), signatures=module.look_up)

    made = context(
        SAVED_MODEL,
        write,
        max_batch_size=4,
        input=[tensor("x", 1, data_type="TYPE_STRING")],
        output=[tensor("y", 1, data_type="TYPE_INT64")],
    )
    words.unlink()
    array = np.array([[b"one"], [b"\xff"], [b"zero"]], np.object_)
    assert answer(TensorflowBackend(made, CPU), x=array).tolist() == [[1], [-1], [0]]


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_strings_without_dimensions(context: Context) -> None:
    join = (lambda x: {"y": tf.strings.join([x, x])}, [tf.TensorSpec([], tf.string, "x")])
    text = {"data_type": "TYPE_STRING"}
    made = context(
        SAVED_MODEL, functions(serving_default=join), input=[tensor("x", 1, **text)], output=[tensor("y", 1, **text)]
    )
    result = answer(TensorflowBackend(made, CPU), x=np.array([b"\xffa"], np.object_))
    assert (result.dtype, result.tolist()) == (np.object_, [b"\xffa\xffa"])


def test_any_rank_is_served_as_configured(context: Context) -> None:
    total = (lambda x: {"y": tf.reduce_sum(x), "z": x}, [tf.TensorSpec(None, tf.float32, "x")])
    made = context(
        SAVED_MODEL,
        functions(serving_default=total),
        input=[tensor("x", -1, 2)],
        output=[tensor("y", 1), tensor("z", -1, 2)],
    )
    backend = TensorflowBackend(made, CPU)
    results = backend.run({"x": np.ones((3, 2), np.float32)}, ["y", "z"])
    assert results["y"].tolist() == [6]
    assert results["z"].shape == (3, 2)


def test_an_input_with_a_value_in_the_graph_may_be_left_out(context: Context) -> None:
    def build() -> None:
        factor = v1.placeholder_with_default(3.0, [], "factor")
        tf.multiply(v1.placeholder(tf.float32, [None, 4], "x"), factor, name="y")

    optional = tensor("factor", 1, optional=True)
    made = context(
        GRAPH_DEF, graph(build), max_batch_size=0, input=[tensor("x", -1, 4), optional], output=[tensor("y", -1, 4)]
    )
    backend = TensorflowBackend(made, CPU)
    assert answer(backend).tolist() == [[3, 6, 9, 12]]
    assert answer(backend, x=X.reshape(1, 4), factor=np.array([5], np.float32)).tolist() == [[5, 10, 15, 20]]


def test_outputs_that_are_one_tensor_or_an_input(context: Context) -> None:
    def write(path: Path) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 4], "in")
            y = x + 1.0
            v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": y, "again": y, "same": x})

    made = context(
        SAVED_MODEL,
        write,
        max_batch_size=4,
        input=[tensor("x", 4)],
        output=[tensor(name, 4) for name in ("y", "again", "same")],
    )
    results = TensorflowBackend(made, CPU).run({"x": X.reshape(1, 4)}, ["again", "same", "y"])
    assert results["y"].tolist() == results["again"].tolist() == [[2, 3, 4, 5]]
    assert results["same"].tolist() == [[1, 2, 3, 4]]


def test_only_what_is_asked_for_is_computed(context: Context) -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        tf.identity(x, name="y")
        with tf.control_dependencies([tf.debugging.assert_less(x, 0.0, message="computed")]):
            tf.identity(x, name="z")

    made = context(GRAPH_DEF, graph(build), **BATCH | {"output": [tensor("y", 4), tensor("z", 4)]})
    backend = TensorflowBackend(made, CPU)
    assert answer(backend).tolist() == [[1, 2, 3, 4]]
    with pytest.raises(Internal, match="computed"):
        backend.run({"x": X.reshape(1, 4)}, ["y", "z"])


def test_choices_of_outputs_do_not_pile_up(context: Context) -> None:
    names = [f"y{number}" for number in range(_MOST_CALLS + 8)]

    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        for number, name in enumerate(names):
            tf.multiply(x, float(number), name=name)

    made = context(GRAPH_DEF, graph(build), **BATCH | {"output": [tensor(name, 4) for name in names]})
    backend = TensorflowBackend(made, CPU)
    for _ in range(2):
        for number, name in enumerate(names):
            assert backend.run({"x": X.reshape(1, 4)}, [name])[name].tolist() == [(X * number).tolist()]
    assert len(backend._session._calls) == _MOST_CALLS


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_a_graph_completes_what_it_knows(context: Context) -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        hidden = tf.multiply(x, 2.0, name="hidden")
        tf.nn.top_k(hidden, 2, name="best")
        tf.nn.softmax(hidden, name="dense/Softmax")

    made = context(GRAPH_DEF, graph(build))
    complete = TensorflowBackend.autocomplete(made)
    assert complete is not None
    assert (complete["max_batch_size"], complete["dynamic_batching"]) == (4, {})
    assert complete["input"] == [tensor("x", 4)]
    assert complete["output"] == [
        tensor("best", 2),
        tensor("best:1", 2, data_type="TYPE_INT32"),
        tensor("dense/Softmax", 4),
    ]
    backend = TensorflowBackend(context(GRAPH_DEF, graph(build), **complete), CPU)
    assert backend.run({"x": X.reshape(1, 4)}, ["best:1"])["best:1"].tolist() == [[3, 2]]
    inside = context(GRAPH_DEF, graph(build), **BATCH | {"output": [tensor("hidden", 4)]})
    assert TensorflowBackend(inside, CPU).run({"x": X.reshape(1, 4)}, ["hidden"])["hidden"].tolist() == [[2, 4, 6, 8]]


class TestBranches:
    """Control flow of TensorFlow 1, where tensors of a branch that is not taken are dead."""

    @pytest.fixture(autouse=True)
    def control_flow(self) -> Iterator[None]:
        v1.disable_control_flow_v2()
        yield
        v1.enable_control_flow_v2()

    @staticmethod
    def branches() -> None:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        is_large = tf.reduce_sum(x) > 10
        small, large = control_flow_ops.switch(x, is_large)
        tf.multiply(large, 2.0, name="large")
        tf.reduce_sum(small, name="number")
        tf.reshape(small, [-1], name="flat")
        tf.cast(small, tf.int32, name="whole")
        tf.as_string(small, name="text")
        tf.identity(v1.cond(is_large, lambda: x * 2.0, lambda: x), name="either")
        v1.cond(is_large, lambda: v1.cond(x[0, 0] > 0.0, lambda: x, lambda: -x), lambda: x, name="nested")
        tf.identity(v1.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y * 2.0), [0, x])[1], name="loop")

    OUTPUTS: ClassVar = [
        tensor("large", -1, 4),
        tensor("number", 1),
        tensor("flat", -1),
        tensor("whole", -1, 4, data_type="TYPE_INT32"),
        tensor("text", -1, 4, data_type="TYPE_STRING"),
        *(tensor(name, -1, 4) for name in ("either", "nested/Merge", "loop")),
    ]

    @pytest.fixture
    def backend(self, context: Context) -> TensorflowBackend:
        made = context(GRAPH_DEF, graph(self.branches), input=[tensor("x", -1, 4)], output=self.OUTPUTS)
        return TensorflowBackend(made, CPU)

    @pytest.mark.parametrize("name", ["number", "flat", "whole", "text"])
    def test_a_dead_output_is_an_error(self, backend: TensorflowBackend, name: str) -> None:
        with pytest.raises(Internal) as caught:
            backend.run({"x": np.full((3, 4), 5, np.float32)}, ["either", name])
        assert caught.value.message == (
            f"INVALID_ARGUMENT: Retval[1] does not have value: '{name}:0' is in a branch of the graph that was not taken"
        )

    @pytest.mark.parametrize("rows", [0, 1, 2])
    def test_living_ones_are_served(self, backend: TensorflowBackend, rows: int) -> None:
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) / 4
        names = ["number", "flat", "whole", "text", "either", "nested/Merge", "loop"]
        results = backend.run({"x": x}, names)
        for name, wanted in zip(
            names, [x.sum().reshape(1), x.ravel(), x.astype(np.int32), None, x, x, 8 * x], strict=True
        ):
            if wanted is not None:
                assert results[name].dtype == wanted.dtype
                np.testing.assert_array_equal(results[name], wanted)
        assert results["text"].shape == x.shape
        large = np.full((3, 4), 5, np.float32)
        np.testing.assert_array_equal(backend.run({"x": large}, ["large"])["large"], 2 * large)

    def test_a_saved_model_says_so_too(self, context: Context) -> None:
        def write(path: Path) -> None:
            with tf.Graph().as_default() as made, v1.Session() as session:
                self.branches()
                x, *ys = (made.get_tensor_by_name(f"{name}:0") for name in ("x", "flat", "large"))
                v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": ys[0], "z": ys[1]})

        outputs = [tensor("y", -1), tensor("z", -1, 4)]
        backend = TensorflowBackend(context(SAVED_MODEL, write, input=[tensor("x", -1, 4)], output=outputs), CPU)
        assert answer(backend, x=X.reshape(1, 4)).tolist() == X.tolist()
        with pytest.raises(Internal, match=r"Retval\[0\] does not have value"):
            answer(backend, x=5 * X.reshape(1, 4))

    def test_only_what_no_branch_decides_on_is_completed(self, context: Context) -> None:
        complete = TensorflowBackend.autocomplete(context(GRAPH_DEF, graph(self.branches)))
        assert complete is not None
        assert "max_batch_size" not in complete  # all rows would take the same branch
        assert complete["input"] == [tensor("x", -1, 4)]
        names = {output["name"] for output in complete["output"]}
        assert names == {"either", "nested/Merge"}  # nor what a loop leaves of an unknown rank


def test_a_graph_that_was_frozen_with_one_row_takes_more(context: Context) -> None:
    """As inception_graphdef of Triton's examples was. Nothing in such a graph depends on the number of rows."""

    def build() -> None:
        tf.multiply(v1.placeholder(tf.float32, [1, 4], "x"), 2.0, name="y")

    made = context(GRAPH_DEF, graph(build), **BATCH)
    assert TensorflowBackend.autocomplete(made) is None
    assert answer(TensorflowBackend(made, CPU), x=np.ones((3, 4), np.float32)).tolist() == [[2] * 4] * 3


def test_ragged_inputs_come_with_what_tells_them_apart(context: Context) -> None:
    function = lambda x, ends: {"y": ends + tf.reduce_sum(x)}  # noqa: E731
    specs = [tf.TensorSpec([None], tf.float32, "x"), tf.TensorSpec([None], tf.float32, "ends")]
    made = context(
        SAVED_MODEL,
        functions(serving_default=(function, specs)),
        max_batch_size=4,
        input=[tensor("x", -1, allow_ragged_batch=True)],
        batch_input=[{"kind": "BATCH_ACCUMULATED_ELEMENT_COUNT", "target_name": ["ends"], "source_input": ["x"]}],
        output=[tensor("y", 1, reshape={"shape": []})],
    )
    result = answer(TensorflowBackend(made, CPU), x=X, ends=np.array([1, 4], np.float32))
    assert result.tolist() == [11, 14]


def test_a_wrong_output_is_answered_with_the_names_there_are(context: Context) -> None:
    made = context(GRAPH_DEF, graph(twice), **BATCH | {"output": [tensor("dense_19/Softmax", 4)]})
    with pytest.raises(InvalidArgument) as refused:
        TensorflowBackend(made, CPU)
    assert refused.value.message == "unexpected inference output 'dense_19/Softmax', allowed outputs are: y, y/y"


def test_an_empty_graph_is_refused(context: Context) -> None:
    with pytest.raises(Internal) as refused:
        TensorflowBackend(context(GRAPH_DEF, graph(lambda: None), **BATCH), CPU)
    assert refused.value.message == "model m has an empty network"


@pytest.mark.parametrize("platform", [SAVED_MODEL, GRAPH_DEF])
def test_auto_completion_of_a_broken_model_fails_with_the_reason(platform: str, context: Context) -> None:
    def write(path: Path) -> None:
        if platform == SAVED_MODEL:
            path.mkdir()
            path = path / "saved_model.pb"
        path.write_bytes(b"not a model (")

    with pytest.raises(Internal) as failed:
        TensorflowBackend.autocomplete(context(platform, write))
    assert failed.value.message.startswith(
        "unable to auto-complete model configuration for 'm', failed to load model: "
    )


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"TF_NUM_INTRA_THREADS": "-1"},
            "parameter 'TF_NUM_INTRA_THREADS' must be non-negative number for TensorFlow model 'm'",
        ),
        (
            {"MAX_SESSION_SHARE_COUNT": "0"},
            "parameter 'MAX_SESSION_SHARE_COUNT' must be positive number for TensorFlow model 'm'",
        ),
        ({"TF_NUM_INTER_THREADS": "two"}, "failed to convert 'two' to integer number"),
        ({"TF_USE_PER_SESSION_THREADS": "perhaps"}, "failed to convert 'perhaps' to boolean value"),
    ],
)
def test_parameters_that_are_refused(values: dict[str, str], text: str, context: Context) -> None:
    with pytest.raises(InvalidArgument) as refused:
        TensorflowBackend(context(SAVED_MODEL, TWICE, **BATCH, **parameters(**values)), CPU)
    assert refused.value.message == text


@pytest.mark.parametrize("text", ["true", "True", "On", "1", "yes"])
def test_what_is_true(text: str, context: Context) -> None:
    made = context(SAVED_MODEL, TWICE, **parameters(TF_USE_PER_SESSION_THREADS=text))
    assert options.read_options(made).use_per_session_threads


def test_instances_share_sessions_up_to_a_number(context: Context) -> None:
    made = context(SAVED_MODEL, TWICE, **BATCH, **parameters(MAX_SESSION_SHARE_COUNT="2"))
    first, second, third = (TensorflowBackend(made, CPU) for _ in range(3))
    assert first._session is second._session
    assert second._session is not third._session
    other_device = TensorflowBackend(made, InstanceContext("m_1", "KIND_MODEL"))
    assert other_device._session is not third._session
    alone = context(SAVED_MODEL, TWICE, **BATCH)
    assert TensorflowBackend(alone, CPU)._session is not TensorflowBackend(alone, CPU)._session


def test_a_shared_session_has_one_set_of_variables(context: Context) -> None:
    """Seen in what the model answers: it counts its runs."""

    class Counting(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.runs = tf.Variable(0.0)

        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "x")])  # type: ignore[untyped-decorator]
        def count(self, x: Any) -> Any:
            return {"y": x * 0.0 + self.runs.assign_add(1.0)}

    def write(path: Path) -> None:
        module = Counting()
        tf.saved_model.save(module, str(path), signatures=module.count)

    def counts(**values: str) -> list[float]:
        made = context(SAVED_MODEL, write, **BATCH, **parameters(**values))
        instances = [TensorflowBackend(made, CPU) for _ in range(2)]
        return [answer(instance)[0, 0] for instance in instances]

    assert counts() == [1, 1]
    assert counts(MAX_SESSION_SHARE_COUNT="2") == [1, 2]


def test_a_session_goes_with_its_last_instance(context: Context) -> None:
    made = context(SAVED_MODEL, TWICE, **BATCH, **parameters(MAX_SESSION_SHARE_COUNT="2"))
    first, second = TensorflowBackend(made, CPU), TensorflowBackend(made, CPU)
    session = weakref.ref(first._session)
    first.close()
    assert answer(second).tolist() == [[2, 4, 6, 8]]
    second.close()
    gc.collect()
    assert session() is None


def uninitialised() -> None:
    """A graph with a variable that is 7 once the operation `init` has run."""
    factor = v1.get_variable("factor", initializer=7.0, use_resource=True)
    tf.multiply(v1.placeholder(tf.float32, [None, 4], "x"), factor, name="y")
    tf.group(factor.initializer, name="init")


def test_init_operations_run_after_loading(context: Context) -> None:
    values = parameters(TF_INIT_OPS_FILE="init.json")
    made = context(GRAPH_DEF, graph(uninitialised), **BATCH, **values)
    with pytest.raises(Unavailable, match=r"'init\.json' is neither in .*m/1 nor in .*m$"):
        TensorflowBackend(made, CPU)
    with pytest.raises(Internal, match=r"^FAILED_PRECONDITION: Could not find variable factor\."):
        answer(TensorflowBackend(context(GRAPH_DEF, graph(uninitialised), **BATCH), CPU))
    (made.directory / "init.json").write_text(json.dumps({"init_ops": ["init"]}))
    assert answer(TensorflowBackend(made, CPU)).tolist() == [[7, 14, 21, 28]]
    # The version's file comes before the model's.
    (made.version_directory / "init.json").write_text(json.dumps({"init_ops": ["nothing"]}))
    with pytest.raises(InvalidArgument, match="'nothing', which is no operation"):
        TensorflowBackend(made, CPU)


@pytest.mark.parametrize("text", ["{", "[]", '{"init_ops": "init"}', "{}"])
def test_an_init_operations_file_that_is_none(text: str, context: Context) -> None:
    made = context(GRAPH_DEF, graph(uninitialised), **BATCH, **parameters(TF_INIT_OPS_FILE="init.json"))
    (made.directory / "init.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"init\.json"):
        TensorflowBackend(made, CPU)


REVERSE = Path(__file__).parent / "tensorflow_reverse_op.c"


def test_custom_operations_are_loaded_from_the_model_s_folder(context: Context, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "m" / "reverse.so"
    library.parent.mkdir()
    command = [compiler, "-shared", "-fPIC", str(REVERSE), "-o", str(library), *tf.sysconfig.get_link_flags()]
    subprocess.run(command, check=True)

    def write(path: Path) -> None:
        graph_def = v1.GraphDef()
        graph_def.node.add(name="x", op="Placeholder").attr["dtype"].type = tf.float32.as_datatype_enum
        graph_def.node.add(name="y", op="NaiadReverse", input=["x"])
        path.write_bytes(graph_def.SerializeToString())

    plain: dict[str, Any] = {"input": [tensor("x", 4)], "output": [tensor("y", 4)]}
    with pytest.raises(Internal, match="NaiadReverse"):
        TensorflowBackend(context(GRAPH_DEF, write, **plain), CPU)
    made = context(GRAPH_DEF, write, **plain, model_operations={"op_library_filename": ["reverse.so"]})
    assert answer(TensorflowBackend(made, CPU), x=X).tolist() == [4, 3, 2, 1]


def test_a_library_that_is_not_there_is_named(context: Context) -> None:
    made = context(SAVED_MODEL, TWICE, **BATCH, model_operations={"op_library_filename": ["none.so"]})
    with pytest.raises(Internal, match=r"none\.so"):
        TensorflowBackend(made, CPU)


@pytest.mark.parametrize(("setting", "size"), [(None, 4), ("16", 16), ("0", 0)])
def test_the_batch_size_of_auto_completion_is_a_setting(setting: str | None, size: int, context: Context) -> None:
    settings = {} if setting is None else {"default-max-batch-size": setting}
    complete = TensorflowBackend.autocomplete(context(SAVED_MODEL, TWICE, settings))
    assert complete is not None
    assert complete.get("max_batch_size", 0) == size
    assert complete["input"] == [tensor("x", 4) if size else tensor("x", -1, 4)]


def test_settings_of_sessions(context: Context) -> None:
    def config(settings: dict[str, str], instance: InstanceContext = GPU) -> Any:
        made = context(SAVED_MODEL, TWICE, settings)
        return options.session_config(made, instance, options.read_options(made))

    assert config({}).allow_soft_placement
    assert not config({"allow-soft-placement": "false"}).allow_soft_placement
    assert config({}).gpu_options.allow_growth
    limited = config({"gpu-memory-fraction": "0.25"}).gpu_options
    assert (limited.per_process_gpu_memory_fraction, limited.allow_growth) == (0.25, True)
    assert config({}, CPU).device_count["GPU"] == 0
    assert "GPU" not in config({}).device_count


def test_soft_placement_moves_what_a_device_cannot_do(context: Context) -> None:
    def build() -> None:
        with tf.device("/gpu:7"):
            twice()

    as_in_graph = InstanceContext("m_0", "KIND_MODEL")
    made = context(GRAPH_DEF, graph(build), **BATCH)
    assert answer(TensorflowBackend(made, as_in_graph)).tolist() == [[2, 4, 6, 8]]
    strict = context(GRAPH_DEF, graph(build), {"allow-soft-placement": "false"}, **BATCH)
    with pytest.raises(Internal, match=r"(?i)gpu:7"):
        TensorflowBackend(strict, as_in_graph)
    # An instance on the CPU takes the graph's devices away.
    assert answer(TensorflowBackend(strict, CPU)).tolist() == [[2, 4, 6, 8]]


@pytest.mark.parametrize("file_format", [SAVED_MODEL, GRAPH_DEF])
def test_what_a_graph_has_on_a_cpu_stays_there(
    file_format: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        with tf.device("/cpu:0"):
            kept = tf.multiply(x, 1.0, name="kept")
        with tf.device("/gpu:7"):
            tf.multiply(kept, 2.0, name="y")

    def save(path: Path) -> None:
        with tf.Graph().as_default() as made, v1.Session() as session:
            build()
            tensors = [{name: made.get_tensor_by_name(f"{name}:0")} for name in "xy"]
            signature = v1.saved_model.predict_signature_def(*tensors)
            builder = v1.saved_model.Builder(str(path))
            builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
            builder.save()

    monkeypatch.setattr(GraphSession, "_check_device", lambda *_: None)
    made = context(file_format, save if file_format == SAVED_MODEL else graph(build), **BATCH)
    backend = TensorflowBackend(made, GPU)
    placed = {name: backend._session._session.graph.get_operation_by_name(name).device for name in ("kept", "y")}
    assert placed == {"kept": "/device:CPU:0", "y": "/device:GPU:0"}
    assert answer(backend).tolist() == [[2, 4, 6, 8]]


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_an_instance_on_a_gpu_that_is_not_there(context: Context) -> None:
    with pytest.raises(Unavailable, match=r"'m_0_0' wants device:GPU:0, and TensorFlow .* finds device:CPU:0"):
        TensorflowBackend(context(SAVED_MODEL, TWICE, **BATCH), GPU)


# --- accelerators ---------------------------------------------------------------------------------------------------


def accelerated(context: Context, instance: InstanceContext, kind: str = "gpu", **accelerators: dict[str, str]) -> Any:
    chosen = [{"name": name, "parameters": values} for name, values in accelerators.items()]
    made = context(
        SAVED_MODEL, TWICE, optimization={"execution_accelerators": {f"{kind}_execution_accelerator": chosen}}
    )
    return options.session_config(made, instance, options.read_options(made))


@pytest.mark.parametrize(
    ("kind", "accelerators", "text"),
    [
        ("cpu", {"openvino": {}}, "CPU Execution Accelerator is not supported in TensorFlow backend"),
        ("gpu", {"warp": {}}, "unknown Execution Accelerator 'warp' is requested"),
        ("gpu", {"tensorrt": {"precision_mode": "INT4"}}, "unsupported precision mode 'INT4' is requested"),
        (
            "gpu",
            {"tensorrt": {"speed": "11"}},
            "unknown parameter 'speed' is provided for TensorRT Execution Accelerator",
        ),
        (
            "gpu",
            {"tensorrt": {}, "auto_mixed_precision": {}},
            "Auto mixed precision can not be set with TFTRT optimization",
        ),
    ],
)
def test_accelerators_that_are_refused(kind: str, accelerators: dict[str, Any], text: str, context: Context) -> None:
    with pytest.raises(InvalidArgument) as refused:
        accelerated(context, GPU, kind, **accelerators)
    assert refused.value.message == text


def test_accelerators_of_gpus_are_ignored_on_the_cpu(context: Context, services: Services) -> None:
    accelerated(context, CPU, warp={})
    assert "GPU Execution Accelerator will be ignored for model instance on CPU" in services.lines


def test_mixed_precision_and_gpu_io(context: Context) -> None:
    rewrites = accelerated(context, GPU, auto_mixed_precision={}, gpu_io={}).graph_options.rewrite_options
    assert rewrites.auto_mixed_precision == type(rewrites).ON


def test_tensorrt_is_set_up_where_tensorflow_has_it(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_tensorrt_build": True})
    config = accelerated(context, GPU, tensorrt={"precision_mode": "FP16", "max_cached_engines": "5"})
    first, last = config.graph_options.rewrite_options.custom_optimizers
    values = first.parameter_map
    assert (first.name, last.name) == ("TensorRTOptimizer", "constfold")
    assert (values["precision_mode"].s, values["max_cached_engines"].i) == (b"FP16", 5)
    assert (values["minimum_segment_size"].i, values["max_workspace_size_bytes"].i) == (3, 1 << 30)


def test_tensorrt_that_tensorflow_does_not_have_is_an_error_of_the_model(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_tensorrt_build": False})
    with pytest.raises(NaiadError, match="has no TensorRT"):
        accelerated(context, GPU, tensorrt={})


# --- effects on a process -------------------------------------------------------------------------------------------
# TensorFlow's thread pools and XLA's flags are the process's: each case is a process forked from one that has
# TensorFlow imported, which is also how hosts come to be.

PROGRAM = """
import collections, json, os, sys
from pathlib import Path
import numpy as np
import naiad.backends.tensorflow as backend
import tensorflow as tf
from naiad.backends.api import InstanceContext, ModelContext

def threads():
    return collections.Counter(Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task"))

def case(config, pipe):
    version = Path(sys.argv[1])
    made = ModelContext("m", 1, version.parent, version, version / "model.graphdef", config, {}, None)
    instances = [backend.TensorflowBackend(made, InstanceContext(f"m_{i}", "KIND_CPU")) for i in range(2)]
    x = np.ones((2, 4), np.float32)
    results = [instance.run({"x": x}, ["y"])["y"].tolist() for instance in instances]
    counted = threads()
    seen = tf.compat.v1.RunMetadata()
    wanted = tf.compat.v1.RunOptions(output_partition_graphs=True)
    instances[0]._session._session.run("y:0", {"x:0": x}, options=wanted, run_metadata=seen)
    nodes = sorted({node.op for graph in seen.partition_graphs for node in graph.node})
    os.write(pipe, json.dumps([counted, nodes, results]).encode())

before = sum(threads().values())
answers = []
for config in json.loads(sys.argv[2]):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            case(config, write)
        finally:
            os._exit(0)
    os.close(write)
    answers.append(json.loads(open(read, "rb").read()))
    os.waitpid(pid, 0)
print(json.dumps([before, answers]))
"""


def chain() -> None:
    """A graph large enough for XLA to take an interest in it."""
    y = v1.placeholder(tf.float32, [None, 4], "x")
    for _ in range(4):
        y = tf.sigmoid(tf.matmul(y, np.full((4, 4), 0.5, np.float32)) * 2.0 + 1.0)
    tf.identity(y, "y")


CASES: dict[str, dict[str, Any]] = {
    "shared pools": parameters(TF_NUM_INTRA_THREADS="5", TF_NUM_INTER_THREADS="3"),
    "a pool each": parameters(TF_NUM_INTRA_THREADS="5", TF_NUM_INTER_THREADS="3", TF_USE_PER_SESSION_THREADS="on"),
    "one session": parameters(TF_NUM_INTER_THREADS="3", TF_USE_PER_SESSION_THREADS="on", MAX_SESSION_SHARE_COUNT="2"),
    "XLA": {"optimization": {"graph": {"level": 1}}},
    "XLA off": {"optimization": {"graph": {"level": -1}}},
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case shows: threads by name, kinds of the nodes that ran, results."""
    version = tmp_path_factory.mktemp("m") / "1"
    version.mkdir()
    graph(chain)(version / "model.graphdef")
    configs = [{"platform": GRAPH_DEF, **BATCH, **case} for case in CASES.values()]
    environment = {key: value for key, value in os.environ.items() if key != "TF_XLA_FLAGS"}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    command = [sys.executable, "-c", PROGRAM, str(version), json.dumps(configs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    before, answers = json.loads(done.stdout)
    return {"before": before, **dict(zip(CASES, answers, strict=True))}


def test_importing_starts_no_thread(processes: dict[str, Any]) -> None:
    assert processes["before"] == 1


@pytest.mark.parametrize(("case", "inter"), [("shared pools", 3), ("a pool each", 6), ("one session", 3)])
def test_threads_between_operations(case: str, inter: int, processes: dict[str, Any]) -> None:
    assert Counter(processes[case][0])["tf_Compute"] == inter


def test_threads_inside_operations(processes: dict[str, Any]) -> None:
    """They have the name of the program, as its main thread has."""
    counted = processes["shared pools"][0]
    assert sum(counted.values()) - counted["tf_Compute"] - counted["tf_graph_runner"] == 5 + 1


def test_xla_compiles_what_the_optimization_level_tells_it_to(processes: dict[str, Any]) -> None:
    assert "_XlaRun" in processes["XLA"][1]
    assert "_XlaRun" not in processes["XLA off"][1]
    np.testing.assert_allclose(processes["XLA"][2], processes["XLA off"][2], rtol=1e-6)
