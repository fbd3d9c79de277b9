"""What is special about the backend openvino; what it shares with the others is in tests/backends."""

import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from naiad.backends.api import Array, ConfigDict, InstanceContext, ModelContext
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable, Unsupported

pytest.importorskip("openvino")

from naiad.backends import openvino as backend
from naiad.backends.openvino import OpenVinoBackend

ov = backend.ov
op = ov.opset15
CPU = InstanceContext("m_0_0", "KIND_CPU")


class Services:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, level: str, message: str, file: str, line: int) -> None:
        self.lines.append(message)

    def call(self, method: str, arguments: Any) -> Any:
        raise NotImplementedError


def parameter(name: str, shape: Sequence[int] | None, element: str = "f32", layout: str = "") -> Any:
    partial = ov.PartialShape.dynamic() if shape is None else ov.PartialShape(list(shape))
    made = op.parameter(partial, getattr(ov.Type, element))
    made.set_friendly_name(name)
    made.output(0).tensor.set_names({name})
    if layout:
        made.set_layout(ov.Layout(layout))
    return made


def result(name: str, node: Any, layout: str = "") -> Any:
    made = op.result(node)
    made.output(0).tensor.set_names({name})
    if layout:
        made.set_layout(ov.Layout(layout))
    return made


def doubling(shape: Sequence[int] | None, element: str = "f32", layout: str = "") -> Any:
    """OUT is twice IN."""
    a = parameter("IN", shape, element, layout)
    return ov.Model([result("OUT", op.add(a, a), layout)], [a], "m")


def fixed_batch_inside(batch: int) -> Any:
    """OUT is IN; a reshape inside knows the batch size."""
    a = parameter("IN", (batch, 4))
    return ov.Model([result("OUT", op.reshape(a, op.constant([batch, 4]), False))], [a], "m")


def summing() -> Any:
    """OUT is the sum of all IN there were."""
    a = parameter("IN", (1, 1))
    total = op.add(op.read_value(op.constant(np.zeros((1, 1), np.float32)), "total", ov.Type.f32, a.partial_shape), a)
    return ov.Model([result("OUT", total)], [op.assign(total, "total")], [a], "m")


def tensor(name: str, dims: Sequence[int], data_type: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{data_type}", "dims": list(dims), **more}


def doubled(dims: Sequence[int], max_batch_size: int = 0, data_type: str = "FP32") -> ConfigDict:
    return {
        "max_batch_size": max_batch_size,
        "input": [tensor("IN", dims, data_type)],
        "output": [tensor("OUT", dims, data_type)],
    }


def parameters(**values: str) -> dict[str, Any]:
    return {key: {"string_value": value} for key, value in values.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., ModelContext]:
    def save(model: Any, config: ConfigDict, settings: dict[str, str] | None = None, **values: str) -> ModelContext:
        version = tmp_path / "m" / "1"
        version.mkdir(parents=True, exist_ok=True)
        path = version / config.get("default_model_filename", "model.xml")
        if model is not None:
            ov.save_model(model, path, compress_to_fp16=False)
        return ModelContext(
            name="m",
            version=1,
            directory=tmp_path / "m",
            version_directory=version,
            path=path,
            config={"name": "m", "parameters": parameters(**values), **config},
            settings=settings or {},
            services=Services(),
        )

    return save


Save = Callable[..., ModelContext]


def rows(count: int, width: int = 4) -> Array:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def run(model: ModelContext, array: Array) -> Array:
    return OpenVinoBackend(model, CPU).run({"IN": array}, ["OUT"])["OUT"]


def refusal(model: ModelContext) -> NaiadError:
    with pytest.raises(NaiadError) as caught:
        OpenVinoBackend(model, CPU)
    return caught.value


def compiled(model: ModelContext) -> Any:
    """The compiled model of a model with one instance, which it loads."""
    OpenVinoBackend(model, CPU)
    (made,) = model._shared.values()
    return made.alone


# --- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, -1, 3], ids=["saved with 1", "saved dynamic", "saved with 3"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_batches_of_any_size_run(saved: Save, batch: int, count: int) -> None:
    array = rows(count)
    np.testing.assert_array_equal(run(saved(doubling((batch, 4)), doubled([4], 8)), array), 2 * array)


@pytest.mark.parametrize("count", [1, 5, 8])
def test_padding_is_cut_off_again(saved: Save, count: int) -> None:
    model = saved(doubling((-1, 4)), doubled([4], 8), ENABLE_BATCH_PADDING="Yes")
    array = rows(count)
    np.testing.assert_array_equal(run(model, array), 2 * array)
    assert compiled(model).inputs[0].partial_shape == ov.PartialShape([8, 4])


def test_a_batch_size_built_into_the_model_is_the_only_one(saved: Save) -> None:
    model = saved(fixed_batch_inside(2), doubled([4], 2))
    instance = OpenVinoBackend(model, CPU)
    assert instance.run({"IN": rows(2)}, ["OUT"])["OUT"].tolist() == rows(2).tolist()
    with pytest.raises(Internal) as caught:
        instance.run({"IN": rows(1)}, ["OUT"])
    assert caught.value.message == (
        "expected requests with batch size '2', got '1'... this error can be avoided by setting 'ENABLE_BATCH_PADDING'"
        " parameter in model configuration to 'YES' at a performance cost."
    )


def test_padding_helps_a_model_with_its_batch_size_built_in(saved: Save) -> None:
    model = saved(fixed_batch_inside(2), doubled([4], 2), ENABLE_BATCH_PADDING="YES")
    assert run(model, rows(1)).tolist() == rows(1).tolist()


def test_a_batch_size_built_in_that_is_not_the_configured_one_fails_the_load(saved: Save) -> None:
    message = refusal(saved(fixed_batch_inside(2), doubled([4], 8))).message
    assert message.startswith("openvino error in setting max batch size : ")


@pytest.mark.parametrize(("own", "count", "max_batch_size"), [(-1, 3, 8), (2, 2, 2)])
def test_the_models_own_batch_is_kept_where_asked(saved: Save, own: int, count: int, max_batch_size: int) -> None:
    model = saved(doubling((own, 4)), doubled([4], max_batch_size), SKIP_OV_DYNAMIC_BATCHSIZE="YES")
    assert run(model, rows(count)).tolist() == (2 * rows(count)).tolist()


@pytest.mark.parametrize("padding", ["YES", "NO"])
def test_more_rows_than_the_model_has_built_in(saved: Save, padding: str) -> None:
    model = saved(doubling((2, 4)), doubled([4], 2), SKIP_OV_DYNAMIC_BATCHSIZE="YES", ENABLE_BATCH_PADDING=padding)
    with pytest.raises(Internal) as caught:
        run(model, rows(3))
    assert caught.value.message == (
        "expected requests with batch size '2', got '3'... this error can be avoided by setting 'max_batch_size' to 2,"
        " which the model has built in."
    )


@pytest.mark.parametrize("value", ["no", "1", "true", ""])
def test_only_yes_is_yes(saved: Save, value: str) -> None:
    model = saved(doubling((2, 4)), doubled([4], 8), SKIP_OV_DYNAMIC_BATCHSIZE=value)
    assert run(model, rows(3)).tolist() == (2 * rows(3)).tolist()


# --- shapes and types ---------------------------------------------------------------------------------------------


def test_layers_are_reshaped_to_the_configuration(saved: Save) -> None:
    model = doubling((1, 4))
    with pytest.raises(InvalidArgument):
        OpenVinoBackend(saved(model, doubled([6], 8)), CPU)
    reshaped = saved(model, doubled([6], 8), RESHAPE_IO_LAYERS="yes")
    assert run(reshaped, rows(2, 6)).tolist() == (2 * rows(2, 6)).tolist()
    opened = saved(doubling((1, 4)), doubled([-1, -1]), RESHAPE_IO_LAYERS="YES")
    assert run(opened, rows(3, 5)).tolist() == (2 * rows(3, 5)).tolist()


def test_layers_cannot_be_reshaped_to_nothing(saved: Save) -> None:
    error = refusal(saved(doubling((1, 4)), doubled([0]), RESHAPE_IO_LAYERS="YES"))
    assert error.message == "openvino backend does not support dimensions values other than `-1` or positive integers"


@pytest.mark.parametrize(
    ("shape", "config", "text"),
    [
        (
            (2, 4),
            doubled([2, 5]),
            "model 'm', tensor 'IN': the model expects 2 dimensions (shape [2,4]) but the model configuration specifies 2"
            " dimensions (shape [2,5])",
        ),
        (
            (-1, 4),
            doubled([4]),
            "model 'm', tensor 'IN': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 1"
            " dimensions (shape [4])",
        ),
        (
            (-1, 4),
            doubled([5], 8),
            "model 'm', tensor 'IN': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 2"
            " dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape,"
            " making complete shape [8,5])",
        ),
        (
            (),
            doubled([1], 8),
            "model 'm', tensor 'IN': for the model to support batching the shape should have at least 1 dimension",
        ),
        (
            (4,),
            {**doubled([4]), "input": []},
            "unable to load model 'm', configuration expects 0 inputs, model provides 1",
        ),
        (
            (4,),
            {**doubled([4]), "input": [tensor("NOT", [4])]},
            "unexpected inference input 'NOT', allowed inputs are: IN",
        ),
        (
            (4,),
            {**doubled([4]), "output": [tensor("NOT", [4])]},
            "unexpected inference output 'NOT', allowed outputs are: OUT",
        ),
        ((4,), doubled([4], data_type="STRING"), "unsupported datatype TYPE_STRING for input 'IN' for model 'm'"),
        ((4,), doubled([4], data_type="FP64"), "unsupported datatype TYPE_FP64 for input 'IN' for model 'm'"),
    ],
)
def test_refusals(saved: Save, shape: Sequence[int], config: ConfigDict, text: str) -> None:
    assert refusal(saved(doubling(shape), config)).message == text


@pytest.mark.parametrize(("element", "data_type"), [("f16", "FP32"), ("f32", "INT32"), ("f64", "FP32")])
def test_a_configured_type_that_is_not_the_models_is_converted(saved: Save, element: str, data_type: str) -> None:
    array = np.array([[1, 2, 3, 4]], np.int32 if data_type == "INT32" else np.float32)
    found = run(saved(doubling((-1, 4), element), doubled([4], 8, data_type)), array)
    assert found.dtype == array.dtype
    assert found.tolist() == [[2, 4, 6, 8]]


def test_dimensions_may_have_bounds(saved: Save) -> None:
    model = doubling((4,))
    model.reshape({0: ov.PartialShape([ov.Dimension(2, 6)])})
    assert run(saved(model, doubled([6])), np.ones(6, np.float32)).tolist() == [2] * 6
    assert refusal(saved(model, doubled([7]))).message == (
        "model 'm', tensor 'IN': the model expects 1 dimensions (shape [-1]) but the model configuration specifies 1"
        " dimensions (shape [7]); the model has bounds: [2..6]"
    )


def test_a_batch_may_have_bounds(saved: Save) -> None:
    model = doubling((-1, 4))
    model.reshape({0: ov.PartialShape([ov.Dimension(1, 3), ov.Dimension(4)])})
    assert run(saved(model, doubled([4], 3)), rows(3)).tolist() == (2 * rows(3)).tolist()
    assert refusal(saved(model, doubled([4], 8))).message.endswith("[8,4]); the model has bounds: [1..3,4]")


def test_an_open_rank_takes_what_is_configured(saved: Save) -> None:
    assert run(saved(doubling(None), doubled([2, 4])), rows(2)).tolist() == (2 * rows(2)).tolist()


def test_a_missing_input_is_the_clients_mistake(saved: Save) -> None:
    with pytest.raises(InvalidArgument, match="'IN'"):
        OpenVinoBackend(saved(doubling((4,)), doubled([4])), CPU).run({}, ["OUT"])


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "INFERENCE_NUM_THREADS",
            "Two",
            "expected the parameter 'INFERENCE_NUM_THREADS' to be a non-negative number, got two",
        ),
        (
            "COMPILATION_NUM_THREADS",
            "-1",
            "expected the parameter 'COMPILATION_NUM_THREADS' to be a non-negative number, got -1",
        ),
        ("HINT_BF16", "No", "expected the parameter 'HINT_BF16' to be YES, got no"),
        ("NUM_STREAMS", "many", "expected the parameter 'NUM_STREAMS' to be either AUTO/NUMA/<int_value>, got many"),
        (
            "PERFORMANCE_HINT",
            "fast",
            "expected the parameter 'PERFORMANCE_HINT' to be LATENCY/THROUGHPUT/CUMULATIVE_THROUGHPUT, got fast",
        ),
    ],
)
def test_parameters_that_cannot_be(saved: Save, key: str, value: str, text: str) -> None:
    error = refusal(saved(doubling((4,)), doubled([4]), **{key: value}))
    assert isinstance(error, InvalidArgument)
    assert error.message == text


@pytest.mark.parametrize(
    ("values", "name", "wanted"),
    [
        ({"INFERENCE_NUM_THREADS": "1"}, "INFERENCE_NUM_THREADS", "1"),
        ({"NUM_STREAMS": "1"}, "NUM_STREAMS", "1"),
        ({"PERFORMANCE_HINT": "throughput"}, "PERFORMANCE_HINT", "THROUGHPUT"),
        ({"PERFORMANCE_HINT": "Latency"}, "PERFORMANCE_HINT", "LATENCY"),
        ({"PERFORMANCE_HINT": "CUMULATIVE_THROUGHPUT"}, "PERFORMANCE_HINT", "CUMULATIVE_THROUGHPUT"),
        ({}, "ENABLE_CPU_PINNING", "False"),
    ],
)
def test_parameters_reach_the_compiled_model(saved: Save, values: dict[str, str], name: str, wanted: str) -> None:
    found = compiled(saved(doubling((4,)), doubled([4]), **values)).get_property(name)
    assert str(found).endswith(wanted)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"HINT_BF16": "yes"}, {"INFERENCE_PRECISION_HINT": "bf16"}),
        ({"NUM_STREAMS": "auto"}, {"NUM_STREAMS": "AUTO"}),
        ({"NUM_STREAMS": "Numa"}, {"NUM_STREAMS": "NUMA"}),
        ({"TARGET_DEVICE": "auto:cpu", "NUM_STREAMS": "3"}, {"NUM_STREAMS": 3}),
        ({"COMPILATION_NUM_THREADS": "3"}, {"COMPILATION_NUM_THREADS": 3}),
    ],
)
def test_what_a_device_is_compiled_with(saved: Save, values: dict[str, str], wanted: dict[str, Any]) -> None:
    device, properties = backend._device_properties(saved(None, {}, **values))
    assert device == values.get("TARGET_DEVICE", "CPU").upper()
    assert wanted.items() <= properties.items()


@pytest.mark.parametrize("device", ["CPU", "AUTO", "AUTO:CPU", "MULTI:CPU", "HETERO:CPU"])
@pytest.mark.parametrize("values", [{}, {"HINT_BF16": "YES"}], ids=["as it is", "bf16"])
def test_the_cpu_computes_in_bfloat16_only_if_told_to(saved: Save, device: str, values: dict[str, str]) -> None:
    a = parameter("IN", (4, 256))
    weights = np.linspace(0.1, 0.9, 256 * 256, dtype=np.float32).reshape(256, 256)
    model = saved(
        ov.Model([result("OUT", op.matmul(a, op.constant(weights), False, False))], [a], "m"),
        {"input": [tensor("IN", [4, 256])], "output": [tensor("OUT", [4, 256])]},
        TARGET_DEVICE=device,
        **values,
    )
    array = np.linspace(0.1, 0.9, 4 * 256, dtype=np.float32).reshape(4, 256)
    is_exact = np.allclose(run(model, array), array @ weights, rtol=1e-5)
    assert is_exact is (not values or "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


@pytest.mark.parametrize("value", ["AUTO", "NUMA"])
def test_streams_by_name_are_taken_by_openvino(saved: Save, value: str) -> None:
    assert run(saved(doubling((4,)), doubled([4]), NUM_STREAMS=value), np.ones(4, np.float32)).tolist() == [2] * 4


class Recorded:
    """An infer request that says when it runs, and waits to be let go on."""

    def __init__(self, request: Any, log: list[str], name: str) -> None:
        self._request, self._log, self._name = request, log, name
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def infer(self) -> None:
        self._log.append(self._name)
        self.inside.set()
        assert self.go_on.wait(60)
        self._request.infer()


class TestInstances:
    """What the instances of a model share."""

    @pytest.fixture(autouse=True)
    def four_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "available_cores", lambda: 4)

    @pytest.mark.parametrize(
        ("values", "counts", "streams"),
        [
            ({}, [1], [None]),
            ({}, [2], [None, 2]),
            ({}, [2, 1], [None, 3]),
            ({}, [9], [None, 4]),
            ({"INFERENCE_NUM_THREADS": "2"}, [3], [None, 2]),
            ({"INFERENCE_NUM_THREADS": "1"}, [3], [None]),
            ({"INFERENCE_NUM_THREADS": "0"}, [3], [None, 3]),
            ({"NUM_STREAMS": "1"}, [2], [1]),
            ({"NUM_STREAMS": "2"}, [2], [2]),
            ({"PERFORMANCE_HINT": "LATENCY"}, [2], [None]),
            ({"TARGET_DEVICE": "AUTO:CPU"}, [2], [None]),
        ],
    )
    def test_several_are_compiled_once_more_with_a_stream_each_unless_the_configuration_says_how_many(
        self,
        saved: Save,
        monkeypatch: pytest.MonkeyPatch,
        values: dict[str, str],
        counts: list[int],
        streams: list[int | None],
    ) -> None:
        seen: list[dict[str, Any]] = []
        graphs: list[Any] = []

        class Core:
            def __init__(self) -> None:
                self._core = ov.Core()

            def __getattr__(self, name: str) -> Any:
                return getattr(self._core, name)

            def compile_model(self, graph: Any, device: str, properties: dict[str, Any]) -> Any:
                seen.append(dict(properties))
                graphs.append(graph)
                return self._core.compile_model(graph, device, {})

        monkeypatch.setattr(backend, "_core", lambda model: Core())
        groups = [{"count": count, "kind": "KIND_CPU"} for count in counts]
        model = saved(doubling((4,)), doubled([4]) | {"instance_group": groups}, **values)
        for _ in range(sum(counts)):
            OpenVinoBackend(model, CPU)
        assert [properties.get("NUM_STREAMS") for properties in seen] == streams
        assert len({properties.get("INFERENCE_NUM_THREADS") for properties in seen}) == 1
        assert all(graph is graphs[0] for graph in graphs)  # with one set of weights

    @pytest.fixture
    def pair(self, saved: Save, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
        """Two instances, what they run with, and which of it ran."""

        def make(least_ns: int) -> Any:
            monkeypatch.setattr(backend, "WORTH_WAKING_NS", least_ns)
            groups = [{"count": 2, "kind": "KIND_CPU"}]
            model = saved(doubling((-1, 4)), doubled([4], 8) | {"instance_group": groups})
            instances = [OpenVinoBackend(model, CPU) for _ in range(2)]
            log: list[str] = []
            for number, instance in enumerate(instances):
                instance._alone = Recorded(instance._alone, log, f"{number} alone")
                instance._together = Recorded(instance._together, log, f"{number} together")
            return *instances, log

        return make

    def test_a_batch_with_no_other_beside_it_has_all_cores(self, pair: Any) -> None:
        one, two, log = pair(0)
        one._alone.go_on.clear()
        other = threading.Thread(target=one.run, args=({"IN": rows(2)}, ["OUT"]))
        other.start()
        assert one._alone.inside.wait(60)
        assert two.run({"IN": rows(3)}, ["OUT"])["OUT"].tolist() == (2 * rows(3)).tolist()
        one._alone.go_on.set()
        other.join(60)
        for instance in (one, two, one):
            assert instance.run({"IN": rows(1)}, ["OUT"])["OUT"].tolist() == (2 * rows(1)).tolist()
        assert log == ["0 alone", "1 together", "0 together", "1 alone", "0 alone"]

    @pytest.mark.parametrize("wrong", [{}, {"IN": rows(2, 5)}], ids=["no input", "a shape that cannot be"])
    def test_one_that_fails_gives_its_cores_back(self, pair: Any, wrong: dict[str, Array]) -> None:
        one, two, log = pair(0)
        for _ in range(2):
            with pytest.raises(NaiadError):
                one.run(wrong, ["OUT"])
        log.clear()
        two.run({"IN": rows(1)}, ["OUT"])
        assert log == ["1 alone"]

    def test_short_ones_wake_nobody(self, pair: Any) -> None:
        one, _, log = pair(3_600_000_000_000)
        for _ in range(3):
            one.run({"IN": rows(1)}, ["OUT"])
        assert log == ["0 alone", "0 together", "0 together"]

    def test_each_keeps_a_state_of_its_own(self, saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
        model = saved(summing(), doubled([1, 1]) | {"instance_group": [{"count": 2}]})
        more = replace(model, config={**model.config, "instance_group": [{"count": 3}]})
        instances = [OpenVinoBackend(model, CPU), OpenVinoBackend(more, CPU)]
        one = np.ones((1, 1), np.float32)
        for total, least_ns in enumerate((0, 3_600_000_000_000, 0), start=1):  # long batches and short ones
            monkeypatch.setattr(backend, "WORTH_WAKING_NS", least_ns)
            assert [instance.run({"IN": one}, ["OUT"])["OUT"].item() for instance in instances] == [total, total]
        assert len(model._shared) == 1

    def test_they_share_what_is_compiled(self, saved: Save) -> None:
        model = saved(doubling((4,)), doubled([4]) | {"instance_group": [{"count": 2}]})
        first, second = OpenVinoBackend(model, CPU), OpenVinoBackend(model, CPU)
        assert len({id(request) for one in (first, second) for request in (one._alone, one._together)}) == 4
        model.path.unlink()
        OpenVinoBackend(model, CPU)  # reads nothing

    def test_those_that_come_later_use_the_same_where_it_has_a_stream_for_each(self, saved: Save) -> None:
        def added(count: int) -> tuple[Any, Any, int]:
            now = replace(model, config={**model.config, "instance_group": [{"count": count}]})
            OpenVinoBackend(now, CPU)
            compiled = backend._compiled(now)
            return compiled.alone, compiled.together, compiled.streams

        model = saved(doubling((4,)), doubled([4]))
        two, again, three, one = added(2), added(2), added(3), added(1)
        assert two == again
        assert two[0] is three[0] is one[0] is one[1]
        assert len({id(compiled) for compiled in (two[0], two[1], three[1])}) == 3
        assert [found[2] for found in (two, three, one, added(4), added(5))] == [2, 3, 1, 4, 4]


def test_a_device_without_compilation_threads_says_so(saved: Save) -> None:
    model = saved(doubling((4,)), doubled([4]), COMPILATION_NUM_THREADS="2")
    assert run(model, np.ones(4, np.float32)).tolist() == [2] * 4
    core = ov.Core()
    if "COMPILATION_NUM_THREADS" not in core.get_property("CPU", "SUPPORTED_PROPERTIES"):
        assert any("COMPILATION_NUM_THREADS" in line for line in model.services.lines)  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", ["parameter", "setting"])
def test_compiled_models_are_cached(saved: Save, by: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    config = doubled([4], 8)
    if by == "parameter":
        model = saved(doubling((-1, 4)), config, CACHE_DIR=str(folder))
    else:
        model = saved(doubling((-1, 4)), config, {"cache-dir": str(folder)})
    assert run(model, rows(2)).tolist() == (2 * rows(2)).tolist()
    assert list(folder.glob("*.blob"))
    assert run(saved(None, model.config, model.settings), rows(2)).tolist() == (2 * rows(2)).tolist()


def test_another_device_by_name(saved: Save) -> None:
    assert (
        run(saved(doubling((4,)), doubled([4]), TARGET_DEVICE="auto:CPU"), np.ones(4, np.float32)).tolist() == [2] * 4
    )


def test_a_missing_device_is_named(saved: Save) -> None:
    error = refusal(saved(doubling((4,)), doubled([4]), TARGET_DEVICE="nothing"))
    assert isinstance(error, Internal)
    assert error.message.startswith("openvino error in loading model : ")
    assert "TARGET_DEVICE is NOTHING" in error.message
    assert "finds CPU" in error.message


def test_a_missing_extension_is_named(saved: Save) -> None:
    error = refusal(saved(doubling((4,)), doubled([4]), CPU_EXTENSION_PATH="/nowhere/libops.so"))
    assert error.message.startswith("openvino error in loading custom CPU extensions : ")
    assert "/nowhere/libops.so" in error.message


@pytest.mark.parametrize("kind", ["KIND_GPU", "KIND_MODEL"])
def test_only_instances_on_the_cpu(saved: Save, kind: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        OpenVinoBackend(saved(doubling((4,)), doubled([4])), InstanceContext("m_0_0", kind))
    assert caught.value.message.startswith(
        "unable to load model 'm', Triton OpenVINO backend supports only Kind CPU and AUTO"
    )


# --- files --------------------------------------------------------------------------------------------------------


def test_a_missing_file(saved: Save) -> None:
    model = saved(None, doubled([4]))
    error = refusal(model)
    assert isinstance(error, Unavailable)
    assert error.message == f"unable to find '{model.path}' for model 'm'"


def test_a_damaged_file_is_an_error_in_reading(saved: Save) -> None:
    model = saved(None, doubled([4]))
    model.path.write_text("nothing")
    assert refusal(model).message.startswith("openvino error in reading model : ")


@pytest.mark.parametrize("filename", ["model.onnx", "other.onnx"])
def test_onnx(saved: Save, filename: str) -> None:
    onnx = pytest.importorskip("onnx")
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Add", ["IN", "IN"], ["OUT"])],
        "g",
        [helper.make_tensor_value_info("IN", number, ("batch", 4))],
        [helper.make_tensor_value_info("OUT", number, ("batch", 4))],
    )
    config = doubled([4], 8)
    if filename != "model.onnx":
        config["default_model_filename"] = filename
    model = saved(None, config)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        model.version_directory / filename,
    )
    assert run(model, rows(3)).tolist() == (2 * rows(3)).tolist()


def encoded(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """A message of protobuf."""
    made = bytearray()
    for number, value in fields:
        if isinstance(value, float):
            made += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            made += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            made += varint(number << 3 | 2) + varint(len(data)) + data
    return bytes(made)


def varint(value: int) -> bytes:
    value %= 1 << 64
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def paddle_program() -> bytes:
    """OUT = 2 * IN, as Paddle saves it: a ProgramDesc of its framework.proto with one block. Numbers: FP32 is 5, LOD_TENSOR
    7, FEED_MINIBATCH 9, FETCH_LIST 10; of attributes INT is 0, FLOAT 1, BOOLEAN 6."""

    def tensor(name: str) -> bytes:
        return encoded(
            (1, name), (2, encoded((1, 7), (3, encoded((1, encoded((1, 5), (2, -1), (2, 4))))))), (3, 0), (4, 1)
        )

    def operation(kind: str, source: str, target: str, *attributes: bytes) -> bytes:
        ports = [(1, encoded((1, "X"), (2, source))), (2, encoded((1, "Out"), (2, target)))]
        return encoded(*ports, (3, kind), *((4, attribute) for attribute in attributes))

    column = encoded((1, "col"), (2, 0), (3, 0))
    scale = [
        encoded((1, "scale"), (2, 1), (4, 2.0)),
        encoded((1, "bias"), (2, 1), (4, 0.0)),
        encoded((1, "bias_after_scale"), (2, 6), (10, 1)),
    ]
    block = encoded(
        (1, 0),
        (2, -1),
        (3, encoded((1, "feed"), (2, encoded((1, 9))), (3, 1))),
        (3, encoded((1, "fetch"), (2, encoded((1, 10))), (3, 1))),
        (3, tensor("IN")),
        (3, tensor("OUT")),
        (4, operation("feed", "feed", "IN", column)),
        (4, operation("scale", "IN", "OUT", *scale)),
        (4, operation("fetch", "OUT", "fetch", column)),
    )
    return encoded((1, block), (4, encoded((1, 2006002))))


def test_paddle(saved: Save) -> None:
    model = saved(None, doubled([4], 8))
    (model.version_directory / "model.pdmodel").write_bytes(paddle_program())
    assert run(model, rows(3)).tolist() == (2 * rows(3)).tolist()
    config = completed(saved(None, {}))
    assert [(it["name"], it["data_type"], it["dims"]) for it in config["input"]] == [("IN", "TYPE_FP32", [-1, 4])]
    assert [(it["name"], it["data_type"], it["dims"]) for it in config["output"]] == [("OUT", "TYPE_FP32", [-1, 4])]


def test_a_paddle_model_without_its_weights(saved: Save) -> None:
    """OpenVINO's text says which file it misses."""
    model = saved(None, {})
    weights = encoded((1, "w"), (2, encoded((1, 7), (3, encoded((1, encoded((1, 5), (2, 4))))))), (3, 1))
    program = encoded((1, encoded((1, 0), (2, -1), (3, weights))), (4, encoded((1, 2006002))))
    (model.version_directory / "model.pdmodel").write_bytes(program)
    with pytest.raises(Internal, match=r"pdiparams.* weight file doesn't exist"):
        OpenVinoBackend.autocomplete(model)


def test_a_missing_front_end_is_named(saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        def get_available_front_ends(self) -> list[str]:
            return ["ir", "onnx"]

    monkeypatch.setattr(ov.frontend, "FrontEndManager", Manager)
    model = saved(None, {**doubled([4]), "default_model_filename": "model.savedmodel"})
    model.path.mkdir()
    error = refusal(model)
    assert isinstance(error, Unsupported)
    assert f"'{model.path}' needs OpenVINO's TensorFlow front end" in error.message
    assert "has ir, onnx only" in error.message


# --- auto-completion ----------------------------------------------------------------------------------------------


def completed(model: ModelContext) -> ConfigDict:
    config = OpenVinoBackend.autocomplete(model)
    assert config is not None
    return config


def test_a_layout_with_a_batch_turns_batching_on(saved: Save) -> None:
    config = completed(saved(doubling((1, 4), layout="NC"), {}))
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"] == {}
    assert config["input"] == [tensor("IN", [4])]
    assert config["output"] == [tensor("OUT", [4])]


@pytest.mark.parametrize(("setting", "size", "dynamic"), [("7", 7, True), ("1", 1, False), ("0", 1, False)])
def test_the_default_batch_size_is_a_setting(saved: Save, setting: str, size: int, dynamic: bool) -> None:
    config = completed(saved(doubling((1, 4), layout="NC"), {}, {"default-max-batch-size": setting}))
    assert config["max_batch_size"] == size
    assert ("dynamic_batching" in config) is dynamic


def test_a_chosen_scheduler_and_size_stay(saved: Save) -> None:
    config = completed(saved(doubling((1, 4), layout="NC"), {"max_batch_size": 3, "sequence_batching": {}}))
    assert config["max_batch_size"] == 3
    assert "dynamic_batching" not in config


def test_without_a_layout_nothing_is_batched_and_the_log_says_how_it_would_be(saved: Save) -> None:
    model = saved(doubling((-1, 4)), {})
    config = completed(model)
    assert config.get("max_batch_size", 0) == 0
    assert config["input"] == [tensor("IN", [-1, 4])]
    assert any("set max_batch_size" in line for line in model.services.lines)  # type: ignore[attr-defined]


def test_what_is_given_stays(saved: Save) -> None:
    config = completed(saved(doubling((-1, 4)), {"max_batch_size": 8, "input": [tensor("IN", [-1])]}))
    assert config["input"] == [tensor("IN", [-1])]
    assert config["output"] == [tensor("OUT", [4])]


def test_a_number_is_completed_as_one(saved: Save) -> None:
    config = completed(saved(doubling(()), {}))
    assert config["input"] == [tensor("IN", [1])]
    assert run(saved(None, config), np.array([2], np.float32)).tolist() == [4]


def test_fp64_is_completed_as_what_is_computed(saved: Save) -> None:
    assert completed(saved(doubling((4,), "f64"), {}))["input"] == [tensor("IN", [4])]


def test_an_open_rank_cannot_be_completed(saved: Save) -> None:
    with pytest.raises(InvalidArgument, match="number of dimensions of input 'IN'"):
        completed(saved(doubling(None), {}))


def test_strings_cannot_be_completed(saved: Save) -> None:
    a = parameter("IN", (4,), "string")
    model = saved(ov.Model([result("OUT", op.shape_of(a))], [a], "m"), {})
    with pytest.raises(Unsupported, match="unsupported datatype string for input 'IN'"):
        completed(model)


# --- the process ----------------------------------------------------------------------------------------------------


def test_importing_starts_no_thread_and_reports_to_nobody() -> None:
    program = (
        "import json, os, sys\n"
        "import naiad.backends.openvino\n"
        "print(json.dumps([len(os.listdir('/proc/self/task')), sys.modules.get('openvino_telemetry') is None,\n"
        "    [name for name in ('tensorflow', 'torch', 'onnx', 'onnxruntime') if name in sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": ""},
    )
    assert json.loads(done.stdout) == [1, True, []]


def test_a_fork_of_the_import_computes(saved: Save) -> None:
    """As a zygote forks hosts; the parent has not used the library itself."""
    model = saved(doubling((-1, 4)), doubled([4], 8))
    program = (
        "import os, sys, pathlib, numpy as np\n"
        "from naiad.backends.openvino import OpenVinoBackend, ov\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    request = ov.Core().compile_model({str(model.path)!r}, 'CPU').create_infer_request()\n"
        "    request.set_input_tensor(0, ov.Tensor(np.ones((2, 4), np.float32), shared_memory=True))\n"
        "    request.infer()\n"
        "    os._exit(0 if request.get_output_tensor(0).data.sum() == 16 else 1)\n"
        "sys.exit(os.waitpid(pid, 0)[1])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
