"""What is special about the backend onnxruntime; what it shares with the others is in tests/backends."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from naiad.backends.api import ConfigDict, InstanceContext, ModelContext
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable, Unsupported

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from naiad.backends import onnxruntime as module  # noqa: E402
from naiad.backends.onnxruntime import OnnxRuntimeBackend, _load_gpu_libraries  # noqa: E402

FLOAT, INT64, STRING, BOOL, BF16 = (
    TensorProto.FLOAT,
    TensorProto.INT64,
    TensorProto.STRING,
    TensorProto.BOOL,
    TensorProto.BFLOAT16,
)
Shape = tuple[int | str | None, ...] | None
Signature = dict[str, tuple[int, Shape]]
CPU = InstanceContext("m_0_0", "KIND_CPU")


class Services:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, level: str, message: str, file: str, line: int) -> None:
        self.lines.append(message)

    def call(self, method: str, arguments: Any) -> Any:
        raise NotImplementedError


def graph(nodes: list[Any], inputs: Signature, outputs: Signature, initializers: tuple[Any, ...] = ()) -> Any:
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *signature) for name, signature in inputs.items()],
        [helper.make_tensor_value_info(name, *signature) for name, signature in outputs.items()],
        list(initializers),
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def copies(signatures: dict[tuple[str, str], tuple[int, Shape]]) -> Any:
    """A model of Identity nodes: (input, output) -> element type and shape."""
    return graph(
        [helper.make_node("Identity", [source], [target]) for source, target in signatures],
        {source: signature for (source, _), signature in signatures.items()},
        {target: signature for (_, target), signature in signatures.items()},
    )


Load = Callable[..., OnnxRuntimeBackend]


@pytest.fixture
def services() -> Services:
    return Services()


@pytest.fixture
def context(tmp_path: Path, services: Services) -> Callable[..., ModelContext]:
    def make(model: Any, config: ConfigDict, settings: dict[str, str] | None = None) -> ModelContext:
        directory = tmp_path / "m"
        (directory / "1").mkdir(parents=True, exist_ok=True)
        path = directory / "1" / "model.onnx"
        if model is not None:
            onnx.save(model, path)
        return ModelContext("m", 1, directory, directory / "1", path, config, settings or {}, services)

    return make


@pytest.fixture
def load(context: Callable[..., ModelContext]) -> Load:
    def make(model: Any, config: ConfigDict, settings: dict[str, str] | None = None) -> OnnxRuntimeBackend:
        return OnnxRuntimeBackend(context(model, config, settings), CPU)

    return make


@pytest.fixture
def complete(context: Callable[..., ModelContext]) -> Callable[..., ConfigDict | None]:
    def make(model: Any, config: ConfigDict, settings: dict[str, str] | None = None) -> ConfigDict | None:
        return OnnxRuntimeBackend.autocomplete(context(model, config, settings))

    return make


def tensor(name: str, data_type: str, dims: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": dims, **more}


def identity_config(data_type: str = "TYPE_FP32", dims: tuple[int, ...] = (4,), **more: Any) -> ConfigDict:
    return {
        "input": [tensor("x", data_type, list(dims))],
        "output": [tensor("y", data_type, list(dims))],
        **more,
    }


BATCH = copies({("x", "y"): (FLOAT, ("n", 4))})
PLAIN = copies({("x", "y"): (FLOAT, (4,))})
X = np.array([1, 2, 3, 4], np.float32)


class TestAutocomplete:
    def test_all_first_dimensions_dynamic_is_a_batching_model(self, complete: Any) -> None:
        assert complete(BATCH, {"backend": "onnxruntime"}) == {
            "backend": "onnxruntime",
            "max_batch_size": 4,
            "dynamic_batching": {},
            "input": [tensor("x", "TYPE_FP32", [4])],
            "output": [tensor("y", "TYPE_FP32", [4])],
        }

    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            ("16", {"max_batch_size": 16, "dynamic_batching": {}}),
            ("1", {"max_batch_size": 1}),
            ("0", {"max_batch_size": 0}),
        ],
    )
    def test_the_default_batch_size_is_a_setting(self, size: str, expected: ConfigDict, complete: Any) -> None:
        found = complete(BATCH, {}, {"default-max-batch-size": size})
        assert {key: value for key, value in found.items() if key not in ("input", "output")} == expected
        assert found["input"][0]["dims"] == ([-1, 4] if size == "0" else [4])

    def test_what_is_configured_stays(self, complete: Any) -> None:
        output = [tensor("y", "TYPE_FP32", [-1])]
        found = complete(BATCH, {"max_batch_size": 9, "sequence_batching": {}, "output": output})
        assert found == {
            "max_batch_size": 9,
            "sequence_batching": {},
            "output": output,
            "input": [tensor("x", "TYPE_FP32", [4])],
        }

    def test_controls_and_states_are_not_for_clients(self, complete: Any) -> None:
        model = copies({(name, name.upper()): (FLOAT, ("n", 1)) for name in ("x", "start", "before")})
        sequence = {
            **control("start", "CONTROL_SEQUENCE_START", fp32_false_true=[0, 1]),
            "state": [{"input_name": "before", "output_name": "BEFORE", "data_type": "TYPE_FP32", "dims": [1]}],
        }
        found = complete(model, {"sequence_batching": sequence})
        assert [tensor["name"] for tensor in found["input"]] == ["x"]
        assert [tensor["name"] for tensor in found["output"]] == ["X", "START"]

    @pytest.mark.parametrize(
        "signatures",
        [
            {("x", "y"): (FLOAT, (1, 4))},
            {("x", "y"): (FLOAT, ("n", 4)), ("a", "b"): (FLOAT, (4,))},
            {("x", "y"): (FLOAT, ("n", 4)), ("a", "b"): (FLOAT, ())},
        ],
    )
    def test_one_fixed_first_dimension_and_it_does_not_batch(self, signatures: Any, complete: Any) -> None:
        found = complete(copies(signatures), {})
        assert found.get("max_batch_size", 0) == 0
        assert "dynamic_batching" not in found

    def test_a_batch_size_for_a_model_that_does_not_batch(self, complete: Any) -> None:
        with pytest.raises(InvalidArgument) as caught:
            complete(PLAIN, {"max_batch_size": 2})
        assert caught.value.message == (
            "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified"
        )

    def test_nothing_left_behind_the_batch_is_one_element(self, complete: Any) -> None:
        found = complete(copies({("x", "y"): (INT64, ("n",))}), {})
        assert found["input"] == [tensor("x", "TYPE_INT64", [1], reshape={"shape": []})]

    def test_numbers_without_dimensions(self, complete: Any) -> None:
        assert complete(copies({("x", "y"): (FLOAT, ())}), {})["input"] == [tensor("x", "TYPE_FP32", [1])]

    def test_order_and_dynamic_extents_are_the_graphs(self, complete: Any) -> None:
        model = copies({("z", "y"): (STRING, (3, "n", None)), ("a", "b"): (BOOL, (1,))})
        assert complete(model, {})["input"] == [
            tensor("z", "TYPE_STRING", [3, -1, -1]),
            tensor("a", "TYPE_BOOL", [1]),
        ]

    def test_complete_already(self, complete: Any, services: Services) -> None:
        assert complete(None, identity_config()) is None
        assert services.lines == [
            "skipping model configuration auto-complete for 'm': inputs and outputs already specified"
        ]

    def test_tensors_only(self, complete: Any) -> None:
        node = helper.make_node("SequenceConstruct", ["x"], ["y"])
        model = graph([node], {"x": (FLOAT, (4,))}, {})
        model.graph.output.append(helper.make_tensor_sequence_value_info("y", FLOAT, (4,)))
        with pytest.raises(Unsupported) as caught:
            complete(model, {})
        assert caught.value.message == (
            "Unsupported ONNX Type 'ONNX_TYPE_SEQUENCE' for I/O 'y', expected 'ONNX_TYPE_TENSOR'."
        )


class TestFiles:
    def test_a_folder_with_the_model_and_its_weights(self, tmp_path: Path, services: Services) -> None:
        weights = onnx.numpy_helper.from_array(np.full(4, 2, np.float32), "w")
        model = graph(
            [helper.make_node("Mul", ["x", "w"], ["y"])], {"x": (FLOAT, (4,))}, {"y": (FLOAT, (4,))}, (weights,)
        )
        folder = tmp_path / "1" / "model.onnx"
        folder.mkdir(parents=True)
        onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
        assert (folder / "weights.bin").exists()
        made = ModelContext("m", 1, tmp_path, folder.parent, folder, identity_config(), {}, services)
        assert OnnxRuntimeBackend(made, CPU).run({"x": X}, ["y"])["y"].tolist() == [2, 4, 6, 8]

    def test_no_file(self, load: Load, tmp_path: Path) -> None:
        with pytest.raises(Unavailable) as caught:
            load(None, identity_config())
        assert caught.value.message == f"unable to find '{tmp_path}/m/1/model.onnx' for model instance 'm'"

    def test_not_a_model(self, context: Any) -> None:
        made = context(None, identity_config())
        made.path.write_bytes(b"nonsense")
        with pytest.raises(Internal, match=r"^onnx runtime error 7: "):
            OnnxRuntimeBackend(made, CPU)


def control(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"control_input": [{"name": name, "control": [{"kind": kind, **more}]}]}


@pytest.mark.parametrize(
    ("model", "config", "text"),
    [
        pytest.param(
            PLAIN,
            identity_config() | {"input": [tensor("x", "TYPE_FP32", [4]), tensor("z", "TYPE_FP32", [4])]},
            "unable to load model 'm', configuration expects 2 inputs, model provides 1",
            id="count",
        ),
        pytest.param(
            copies({("x", "y"): (FLOAT, (4,)), ("a", "b"): (FLOAT, (4,))}),
            identity_config() | {"input": [tensor("x", "TYPE_FP32", [4]), tensor("z", "TYPE_FP32", [4])]},
            "unexpected inference input 'z', allowed inputs are: a, x",
            id="input name",
        ),
        pytest.param(
            PLAIN,
            identity_config() | {"output": [tensor("z", "TYPE_FP32", [4])]},
            "unexpected inference output 'z', allowed outputs are: y",
            id="output name",
        ),
        pytest.param(
            copies({("x", "y"): (STRING, (4,))}),
            identity_config(),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'x', model provides TYPE_BYTES",
            id="input type",
        ),
        pytest.param(
            PLAIN,
            identity_config() | {"output": [tensor("y", "TYPE_INT8", [4])]},
            "unable to load model 'm', configuration expects datatype TYPE_INT8 for output 'y', model provides TYPE_FP32",
            id="output type",
        ),
        pytest.param(
            PLAIN,
            identity_config(dims=(2, 2)),
            "model 'm', tensor 'x': the model expects 1 dimensions (shape [4]) but the model configuration specifies 2"
            " dimensions (shape [2,2])",
            id="dims",
        ),
        pytest.param(
            BATCH,
            identity_config(dims=(5,), max_batch_size=4),
            "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 2"
            " dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape,"
            " making complete shape [-1,5])",
            id="dims of a batch",
        ),
        pytest.param(
            PLAIN,
            identity_config(dims=(), max_batch_size=4),
            "model 'm', tensor 'x': for the model to support batching the shape should have at least 1 dimension and the"
            " first dimension must be -1; but shape expected by the model is [4]",
            id="no batch dimension",
        ),
        pytest.param(
            copies({("x", "y"): (FLOAT, ("n",))}),
            identity_config(),
            "model 'm', tensor 'y': the model expects 1 dimensions (shape [-1]) but the model configuration specifies 1"
            " dimensions (shape [4])",
            id="an output's dynamic extent cannot be fixed",
        ),
        pytest.param(
            PLAIN,
            identity_config(dims=(-1,)),
            "model 'm', tensor 'x': the model expects 1 dimensions (shape [4]) but the model configuration specifies 1"
            " dimensions (shape [-1])",
            id="a fixed extent cannot be opened",
        ),
        pytest.param(
            copies({("x", "y"): (FLOAT, ())}),
            identity_config(dims=(1, 2)),
            "unable to load model 'm', scalar tensor 'x', should only provide 1 in the model configuration when the model"
            " doesn't support batching. Model configuration provided: [1,2].",
            id="scalar",
        ),
        pytest.param(
            BATCH,
            identity_config(max_batch_size=4)
            | {"input": [tensor("x", "TYPE_FP32", [4]), tensor("o", "TYPE_FP32", [4], optional=True)]},
            "unable to load model 'm', optional input 'o' is not supported for models that support batching",
            id="optional",
        ),
        pytest.param(
            BATCH,
            identity_config(max_batch_size=4) | {"input": [tensor("x", "TYPE_FP32", [4], allow_ragged_batch=True)]},
            "unable to load model 'm', configuration expects model provides input with shape [-1]  for ragged input 'x',"
            " model provides [-1,4]",
            id="ragged",
        ),
        pytest.param(
            BATCH,
            identity_config(max_batch_size=4, sequence_batching=control("s", "CONTROL_SEQUENCE_START")),
            "configuration specified sequence control 's', but model does not provide that input",
            id="control",
        ),
        pytest.param(
            copies({("x", "y"): (FLOAT, ("n", 4)), ("s", "t"): (INT64, ("n", 1))}),
            identity_config(
                max_batch_size=4,
                sequence_batching=control("s", "CONTROL_SEQUENCE_START", int32_false_true=[0, 1]),
            ),
            "unable to load model 'm', sequence control 's', the model expects data-type INT64 but the model"
            " configuration specifies data-type TYPE_INT32",
            id="control type",
        ),
        pytest.param(
            copies({("x", "y"): (FLOAT, ("n", 4)), ("s", "t"): (FLOAT, ("n", 2))}),
            identity_config(
                max_batch_size=4,
                sequence_batching=control("s", "CONTROL_SEQUENCE_READY", fp32_false_true=[0, 1]),
            ),
            "unable to load model 'm', sequence control 's' in model has dims [2] but dims [1] is expected",
            id="control dims",
        ),
        pytest.param(
            copies({("x", "y"): (FLOAT, ("n", 4)), ("s", "t"): (FLOAT, ("n", 2))}),
            identity_config(
                max_batch_size=4,
                sequence_batching={
                    "state": [{"input_name": "s", "output_name": "t", "data_type": "TYPE_INT32", "dims": [2]}]
                },
            ),
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for output state 't', model provides"
            " TYPE_FP32",
            id="state type",
        ),
        pytest.param(
            PLAIN,
            identity_config(parameters={"execution_mode": {"string_value": "2"}}),
            "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2 .",
            id="execution mode",
        ),
        pytest.param(
            PLAIN,
            identity_config(parameters={"intra_op_thread_count": {"string_value": "many"}}),
            "failed to convert 'many' to integer number",
            id="a number",
        ),
        pytest.param(
            PLAIN,
            identity_config(parameters={"enable_mem_arena": {"string_value": "perhaps"}}),
            "failed to convert 'perhaps' to boolean value",
            id="a truth value",
        ),
        pytest.param(
            PLAIN,
            identity_config(optimization={"execution_accelerators": {"cpu_execution_accelerator": [{"name": "warp"}]}}),
            "unknown Execution Accelerator 'warp' is requested",
            id="accelerator",
        ),
        pytest.param(
            copies({("x", "y"): (BF16, (4,)), ("s", "t"): (STRING, (4,))}),
            {
                "input": [tensor("x", "TYPE_BF16", [4]), tensor("s", "TYPE_STRING", [4])],
                "output": [tensor("y", "TYPE_BF16", [4])],
            },
            "unable to load model 'm': ONNX Runtime's Python interface cannot run a model that takes strings and answers"
            " BF16; cast one of them inside the model",
            id="BF16 and strings",
        ),
    ],
)
def test_refused(model: Any, config: ConfigDict, text: str, load: Load) -> None:
    with pytest.raises(NaiadError) as caught:
        load(model, config)
    assert caught.value.message == text


class TestProviders:
    @pytest.fixture(autouse=True)
    def only_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])

    def test_an_accelerator_that_is_not_installed(self, load: Load) -> None:
        accelerators = {"cpu_execution_accelerator": [{"name": "openvino"}]}
        with pytest.raises(Unsupported) as caught:
            load(PLAIN, identity_config(optimization={"execution_accelerators": accelerators}))
        assert caught.value.message == (
            "unable to load model 'm': it asks for the OpenVINOExecutionProvider, and the installed onnxruntime"
            f" {ort.__version__} offers CPUExecutionProvider. The distribution onnxruntime-openvino has it: install it in"
            " place of onnxruntime"
        )

    def test_a_gpu_that_onnxruntime_cannot_use(self, context: Any) -> None:
        with pytest.raises(Unsupported, match=r"CUDAExecutionProvider.*onnxruntime-gpu"):
            OnnxRuntimeBackend(context(PLAIN, identity_config()), InstanceContext("m_0_0", "KIND_GPU"))

    def test_accelerators_of_gpus_are_for_gpus(self, load: Load) -> None:
        accelerators = {"gpu_execution_accelerator": [{"name": "tensorrt"}]}
        load(PLAIN, identity_config(optimization={"execution_accelerators": accelerators}))


class TestProviderOptions:
    """What ONNX Runtime is asked for on a machine that has everything."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, context: Any) -> Callable[..., list[tuple[str, dict[str, str]]]]:
        """Opens a session of the real CPU provider and says which ones were asked for."""
        real = ort.InferenceSession
        providers: list[tuple[str, dict[str, str]]] = []
        everything = [
            "TensorrtExecutionProvider",
            "CUDAExecutionProvider",
            "OpenVINOExecutionProvider",
            "CPUExecutionProvider",
        ]

        class Session:
            def __init__(
                self, path: str, options: Any, providers: list[str], provider_options: list[Any], **more: Any
            ) -> None:
                asked_for.extend(zip(providers, provider_options, strict=True))
                self._real = real(path, options, providers=["CPUExecutionProvider"])

            def get_providers(self) -> list[str]:
                return everything

            def __getattr__(self, name: str) -> Any:
                return getattr(self._real, name)

        asked_for = providers
        monkeypatch.setattr(ort, "get_available_providers", lambda: everything)
        monkeypatch.setattr(ort, "InferenceSession", Session)

        def ask(kind: Any, **config: Any) -> list[tuple[str, dict[str, str]]]:
            OnnxRuntimeBackend(context(PLAIN, identity_config(**config)), InstanceContext("m_0_0", kind, 3))
            return providers

        return ask

    def test_cpu(self, asked: Any) -> None:
        assert asked("KIND_CPU") == [("CPUExecutionProvider", {})]

    def test_gpu(self, asked: Any) -> None:
        assert asked("KIND_GPU") == [("CUDAExecutionProvider", {"device_id": "3"}), ("CPUExecutionProvider", {})]

    def test_the_libraries_of_gpus_are_loaded_once_and_first(self, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded: list[str] = []
        monkeypatch.setattr(ort, "preload_dlls", lambda: loaded.append("cuda"))
        monkeypatch.setattr(module.importlib, "import_module", loaded.append)
        operators = ort.SessionOptions
        monkeypatch.setattr(operators, "register_custom_ops_library", lambda options, path: loaded.append(path))
        own = {"op_library_filename": ["own.so"]}
        tensorrt = {"execution_accelerators": {"gpu_execution_accelerator": [{"name": "tensorrt"}]}}
        _load_gpu_libraries.cache_clear()
        asked("KIND_CPU")
        assert loaded == []
        # Those of operators may need them.
        asked("KIND_GPU", model_operations=own)
        asked("KIND_GPU")
        assert loaded == ["cuda", "own.so"]
        asked("KIND_GPU", optimization=tensorrt)
        assert loaded[-1] == "tensorrt_libs"
        _load_gpu_libraries.cache_clear()

    def test_completion_looks_at_the_model_where_it_will_run(self, asked: Any, context: Any) -> None:
        group = {"kind": "KIND_GPU", "gpus": [2, 1]}
        assert OnnxRuntimeBackend.autocomplete(context(PLAIN, {"name": "m", "instance_group": [group]}))
        assert asked("KIND_CPU")[0] == ("CUDAExecutionProvider", {"device_id": "2"})

    def test_accelerators_with_options(self, asked: Any) -> None:
        accelerators = {
            "gpu_execution_accelerator": [
                {
                    "name": "tensorrt",
                    "parameters": {
                        "precision_mode": "FP16",
                        "max_workspace_size_bytes": "1024",
                        "trt_engine_cache_enable": "1",
                        "int8_use_native_calibration_table": "off",
                        "trt_builder_optimization_level": "1",
                    },
                },
                {"name": "cuda", "parameters": {"use_tf32": "0"}},
            ],
            "cpu_execution_accelerator": [{"name": "openvino"}],
        }
        assert asked("KIND_GPU", optimization={"execution_accelerators": accelerators}) == [
            (
                "TensorrtExecutionProvider",
                {
                    "trt_fp16_enable": "True",
                    "trt_max_workspace_size": "1024",
                    "trt_engine_cache_enable": "True",
                    "trt_int8_use_native_calibration_table": "False",
                    "trt_builder_optimization_level": "1",
                    "device_id": "3",
                },
            ),
            ("CUDAExecutionProvider", {"use_tf32": "0", "device_id": "3"}),
            ("OpenVINOExecutionProvider", {"device_type": "CPU"}),
            ("CPUExecutionProvider", {}),
        ]

    def test_the_older_parameters_of_the_model(self, asked: Any) -> None:
        parameters = {
            "cudnn_conv_algo_search": {"string_value": "1"},
            "arena_extend_strategy": {"string_value": "1"},
            "gpu_mem_limit": {"string_value": "1000"},
        }
        assert asked("KIND_GPU", parameters=parameters)[0] == (
            "CUDAExecutionProvider",
            {
                "cudnn_conv_algo_search": "HEURISTIC",
                "arena_extend_strategy": "kSameAsRequested",
                "gpu_mem_limit": "1000",
                "device_id": "3",
            },
        )

    @pytest.mark.parametrize(
        ("accelerator", "text"),
        [
            ({"name": "warp"}, "unknown Execution Accelerator 'warp' is requested"),
            (
                {"name": "tensorrt", "parameters": {"precision_mode": "FP1"}},
                "unsupported precision mode 'FP1' is requested",
            ),
            (
                {"name": "tensorrt", "parameters": {"speed": "1"}},
                "unknown parameter 'speed' is provided for TensorRT Execution Accelerator",
            ),
            (
                {"name": "tensorrt", "parameters": {"trt_engine_cache_enable": "maybe"}},
                "failed to convert 'maybe' to boolean value",
            ),
        ],
    )
    def test_unknown(self, accelerator: Any, text: str, asked: Any) -> None:
        accelerators = {"gpu_execution_accelerator": [accelerator]}
        with pytest.raises(InvalidArgument) as caught:
            asked("KIND_GPU", optimization={"execution_accelerators": accelerators})
        assert caught.value.message == text


def opened_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The SessionOptions of all that are opened from now on, on a machine of 12 cores."""
    real = ort.InferenceSession
    seen: list[Any] = []

    def session(path: str, options: Any, **more: Any) -> Any:
        seen.append(options)
        return real(path, options, **more)

    monkeypatch.setattr(ort, "InferenceSession", session)
    monkeypatch.setattr("naiad.backends.cores.available_cores", lambda: 12)
    monkeypatch.setattr("naiad.backends.onnxruntime.available_cores", lambda: 12)
    return seen


class TestOptions:
    @pytest.fixture
    def options(self, monkeypatch: pytest.MonkeyPatch, context: Any) -> Callable[..., Any]:
        """The SessionOptions a session is opened with."""
        seen = opened_sessions(monkeypatch)

        def make(settings: dict[str, str] | None = None, **config: Any) -> Any:
            OnnxRuntimeBackend(context(PLAIN, identity_config(**config), settings), CPU)
            return seen[0]

        return make

    @pytest.mark.parametrize(
        ("level", "expected"),
        [
            (None, "ORT_ENABLE_ALL"),
            (0, "ORT_ENABLE_ALL"),
            (-1, "ORT_ENABLE_BASIC"),
            (1, "ORT_ENABLE_EXTENDED"),
            (2, "ORT_DISABLE_ALL"),
        ],
    )
    def test_graph_optimisation(self, level: int | None, expected: str, options: Any) -> None:
        optimization = {} if level is None else {"graph": {"level": level}}
        assert options(optimization=optimization).graph_optimization_level.name == expected

    def test_threads_rest_between_batches(self, options: Any) -> None:
        assert options().get_session_config_entry("session.force_spinning_stop") == "1"

    def test_parameters(self, options: Any) -> None:
        values = {
            "intra_op_thread_count": "3",
            "inter_op_thread_count": "2",
            "execution_mode": "1",
            "enable_mem_arena": "0",
            "enable_mem_pattern": "false",
            "session.use_device_allocator_for_initializers": "1",
        }
        found = options(parameters={key: {"string_value": value} for key, value in values.items()})
        assert found.intra_op_num_threads == 3
        assert found.inter_op_num_threads == 2
        assert found.execution_mode.name == "ORT_PARALLEL"
        assert found.enable_cpu_mem_arena is False
        assert found.enable_mem_pattern is False
        assert found.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"


class Recorded:
    """A session that says which it is and may be made to wait in `run`."""

    def __init__(self, session: Any, log: list[str], name: str) -> None:
        self._session, self._log, self._name = session, log, name
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def run(self, *arguments: Any) -> Any:
        self._log.append(self._name)
        self.inside.set()
        assert self.go_on.wait(60)
        return self._session.run(*arguments)


class TestInstances:
    """What the instances of a model share."""

    @pytest.fixture
    def threads(self, monkeypatch: pytest.MonkeyPatch, context: Any) -> Callable[..., list[int]]:
        """The threads of each session that a model with these instances opens."""
        seen = opened_sessions(monkeypatch)

        def make(count: int, settings: dict[str, str] | None = None, **config: Any) -> list[int]:
            groups = [{"kind": "KIND_CPU", "count": count}]
            model = context(PLAIN, identity_config(instance_group=groups, **config), settings)
            for number in range(count):
                OnnxRuntimeBackend(model, InstanceContext(f"m_0_{number}", "KIND_CPU"))
            return [options.intra_op_num_threads for options in seen]

        return make

    @pytest.mark.parametrize(("count", "expected"), [(1, [12]), (2, [12, 11]), (4, [12, 9]), (13, [12, 1])])
    def test_two_sessions_serve_all(self, count: int, expected: list[int], threads: Any) -> None:
        assert threads(count) == expected

    def test_those_that_come_later_use_the_same_and_have_it_fit_all(self, threads: Any, context: Any) -> None:
        def with_count(count: int) -> Any:
            return replace(model, config=identity_config(instance_group=[{"kind": "KIND_CPU", "count": count}]))

        def added(count: int) -> tuple[OnnxRuntimeBackend, int]:
            instance = OnnxRuntimeBackend(with_count(count), CPU)
            return instance, instance._sessions.together.get_session_options().intra_op_num_threads

        model = context(PLAIN, identity_config())
        first, second = added(1), added(2)
        assert (first[1], second[1]) == (12, 11)
        assert added(2)[1] == 11
        assert added(4)[0]._sessions is second[0]._sessions is first[0]._sessions
        assert threads(0) == [12, 11, 9]
        assert added(1)[0]._sessions.together is first[0]._sessions.alone
        assert threads(0) == [12, 11, 9]

    @pytest.mark.parametrize(
        ("parameter", "expected"), [("intra_op_thread_count", [3, 3]), ("inter_op_thread_count", [6, 6])]
    )
    def test_who_says_how_many_threads_gets_them_for_each(
        self, parameter: str, expected: list[int], threads: Any
    ) -> None:
        assert threads(2, parameters={parameter: {"string_value": "3"}}) == expected

    def test_custom_operators_may_not_bear_two_threads(self, threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ort.SessionOptions, "register_custom_ops_library", lambda options, path: None)
        assert threads(2, model_operations={"op_library_filename": ["own.so"]}) == [6, 6]

    @pytest.fixture
    def pair(self, context: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Two instances, their sessions, and which of them ran."""

        def make(least_ns: int) -> Any:
            opened_sessions(monkeypatch)
            monkeypatch.setattr(module, "WORTH_WAKING_NS", least_ns)
            model = context(PLAIN, identity_config(instance_group=[{"kind": "KIND_CPU", "count": 2}]))
            one, two = (OnnxRuntimeBackend(model, InstanceContext(f"m_0_{number}", "KIND_CPU")) for number in (0, 1))
            log: list[str] = []
            sessions = one._sessions
            assert two._sessions is sessions
            sessions.alone = Recorded(sessions.alone, log, "alone")
            sessions.together = Recorded(sessions.together, log, "together")
            return one, two, sessions, log

        return make

    def test_a_batch_with_no_other_beside_it_has_all_cores(self, pair: Any) -> None:
        one, two, sessions, log = pair(0)
        assert one.run({"x": X}, ["y"])["y"].tolist() == X.tolist()
        sessions.alone.inside.clear()
        sessions.alone.go_on.clear()
        other = threading.Thread(target=one.run, args=({"x": X}, ["y"]))
        other.start()
        assert sessions.alone.inside.wait(60)
        assert two.run({"x": X}, ["y"])["y"].tolist() == X.tolist()
        sessions.alone.go_on.set()
        other.join(60)
        for instance in (one, two, one):
            instance.run({"x": X}, ["y"])
        assert log == ["alone", "alone", "together", "together", "alone", "alone"]

    def test_one_that_fails_gives_its_cores_back(self, pair: Any) -> None:
        one, two, _, log = pair(0)
        with pytest.raises(NaiadError):
            one.run({"x": X[:3]}, ["y"])
        assert two.run({"x": X}, ["y"])["y"].tolist() == X.tolist()
        assert log == ["alone", "alone"]

    def test_short_ones_wake_nobody(self, pair: Any) -> None:
        one, _, _, log = pair(3_600_000_000_000)
        for _ in range(3):
            one.run({"x": X}, ["y"])
        assert log[1:] == ["together", "together"]


def test_a_library_of_operators_that_is_not_there(load: Load) -> None:
    with pytest.raises(Internal, match=r"no_such_operators\.so"):
        load(PLAIN, identity_config(model_operations={"op_library_filename": ["no_such_operators.so"]}))


class TestRun:
    def test_an_optional_input(self, load: Load) -> None:
        """A graph input with a default value may be left out of a request."""
        factor = helper.make_tensor("f", FLOAT, [1], [10.0])
        model = graph(
            [helper.make_node("Mul", ["x", "f"], ["y"])],
            {"x": (FLOAT, (4,)), "f": (FLOAT, (1,))},
            {"y": (FLOAT, (4,))},
            (factor,),
        )
        config = identity_config()
        config["input"].append(tensor("f", "TYPE_FP32", [1], optional=True))
        loaded = load(model, config)
        assert loaded.run({"x": X}, ["y"])["y"].tolist() == [10, 20, 30, 40]
        assert loaded.run({"x": X, "f": np.array([2], np.float32)}, ["y"])["y"].tolist() == [2, 4, 6, 8]

    def test_a_failure_has_tritons_text(self, load: Load) -> None:
        loaded = load(PLAIN, identity_config())
        with pytest.raises(Internal, match=r"^onnx runtime error 2: Got invalid dimensions for input: x"):
            loaded.run({"x": np.zeros(5, np.float32)}, ["y"])

    def test_state_and_control_inputs(self, load: Load) -> None:
        model = graph(
            [helper.make_node("Add", ["x", "before"], ["after"]), helper.make_node("Identity", ["start"], ["y"])],
            {"x": (FLOAT, ("n", 4)), "before": (FLOAT, ("n", 4)), "start": (BOOL, ("n", 1))},
            {"y": (BOOL, ("n", 1)), "after": (FLOAT, ("n", 4))},
        )
        state = {"input_name": "before", "output_name": "after", "data_type": "TYPE_FP32", "dims": [4]}
        config = {
            "max_batch_size": 4,
            "input": [tensor("x", "TYPE_FP32", [4])],
            "output": [tensor("y", "TYPE_BOOL", [1])],
            "sequence_batching": {
                **control("start", "CONTROL_SEQUENCE_START", bool_false_true=[False, True]),
                "state": [state],
            },
        }
        batch = X.reshape(1, 4)
        results = load(model, config).run({"x": batch, "before": batch, "start": np.array([[True]])}, ["y", "after"])
        assert results["after"].tolist() == [[2, 4, 6, 8]]
        assert results["y"].tolist() == [[True]]

    def test_ragged_inputs_and_what_the_batcher_adds(self, load: Load) -> None:
        """All elements of a batch in one row, and how many each request has; the answer is theirs to split."""
        model = graph(
            [
                helper.make_node("Identity", ["counts"], ["copy"]),
                helper.make_node("Unsqueeze", ["copy", "axis"], ["y"]),
                helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=1),
            ],
            {"x": (FLOAT, ("n",)), "counts": (FLOAT, ("batch",))},
            {"y": (FLOAT, ("batch", 1)), "sum": (FLOAT, (1,))},
            (helper.make_tensor("axis", INT64, [1], [1]),),
        )
        config = {
            "max_batch_size": 4,
            "input": [tensor("x", "TYPE_FP32", [-1], allow_ragged_batch=True)],
            "output": [tensor("y", "TYPE_FP32", [1])],
            "batch_input": [
                {
                    "kind": "BATCH_ELEMENT_COUNT",
                    "target_name": ["counts"],
                    "data_type": "TYPE_FP32",
                    "source_input": ["x"],
                }
            ],
        }
        inputs = {"x": np.ones(5, np.float32), "counts": np.array([2, 3], np.float32)}
        assert load(model, config).run(inputs, ["y"])["y"].tolist() == [[2], [3]]

    def test_memory_may_be_given_back_after_each_run(self, load: Load) -> None:
        parameters = {"memory.enable_memory_arena_shrinkage": {"string_value": "cpu:0"}}
        loaded = load(PLAIN, identity_config(parameters=parameters))
        assert loaded.run({"x": X}, ["y"])["y"].tolist() == X.tolist()


PROCESS = """
import os, sys
from pathlib import Path
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from naiad.backends.onnxruntime import OnnxRuntimeBackend
from naiad.backends.api import InstanceContext, ModelContext
def threads(): return len(os.listdir("/proc/self/task"))
print(threads())
path = Path(sys.argv[1])
config = {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}], "output": []}
settings = {"enable-global-threadpool": "1", "intra_op_thread_count": "3"}
model = ModelContext("m", 1, path.parent, path.parent, path, config, settings, None)
one = OnnxRuntimeBackend(model, InstanceContext("a", "KIND_CPU"))
print(threads())
two = OnnxRuntimeBackend(model, InstanceContext("b", "KIND_CPU"))
print(threads())
"""


def test_the_import_starts_no_thread_and_a_global_pool_serves_all_sessions(tmp_path: Path) -> None:
    """A zygote forks after the import, so it must have one thread. In a process of its own: a pool is for ever."""
    onnx.save(PLAIN, tmp_path / "model.onnx")
    result = subprocess.run(
        [sys.executable, "-c", PROCESS, tmp_path / "model.onnx"], check=True, capture_output=True, text=True
    )
    imported, first, second = map(int, result.stdout.split())
    assert imported == 1
    assert first > 1
    assert second == first
