"""The backend `onnxruntime`: ONNX models. Runs in hosts, on the instance's thread.

On the CPU all instances share two sessions: one computes with all cores, for a batch that has no other beside it, the
other is for batches that run at the same time. Each instance has a session of its own where it is not on the CPU, where
the configuration says how many threads a session has, and with custom operators, which may not bear two threads.

Session options, execution providers and the checks of a configuration against the model's own signature are
those of Triton's ONNX Runtime backend, texts included. Arrays go in without a copy; ONNX Runtime makes the
arrays that come out. Its Python interface knows text only as str, so BYTES must be UTF-8 here.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from naiad.backends.api import Array, ArrayBackend, ConfigDict, InstanceContext, ModelContext
from naiad.backends.arrays import from_text, to_text
from naiad.backends.configured import control_inputs, framework_dims, integer, shape_text, wrong_dims
from naiad.backends.cores import WORTH_WAKING_NS, Occupancy, available_cores, cores_left_to_all, cores_per_instance
from naiad.backends.placement import first_instance
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable, Unsupported

# Official builds report usage to Microsoft from a thread they start on import. A server does not phone home
# unasked, and a zygote must not have that thread when it forks.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

_TENSOR_TYPES = {
    "tensor(bool)": DataType.BOOL,
    "tensor(uint8)": DataType.UINT8,
    "tensor(uint16)": DataType.UINT16,
    "tensor(uint32)": DataType.UINT32,
    "tensor(uint64)": DataType.UINT64,
    "tensor(int8)": DataType.INT8,
    "tensor(int16)": DataType.INT16,
    "tensor(int32)": DataType.INT32,
    "tensor(int64)": DataType.INT64,
    "tensor(float16)": DataType.FP16,
    "tensor(float)": DataType.FP32,
    "tensor(double)": DataType.FP64,
    "tensor(string)": DataType.BYTES,
    "tensor(bfloat16)": DataType.BF16,
}
_OTHER_TYPES = {
    "seq": "ONNX_TYPE_SEQUENCE",
    "map": "ONNX_TYPE_MAP",
    "opaque": "ONNX_TYPE_OPAQUE",
    "sparse_tensor": "ONNX_TYPE_SPARSETENSOR",
}
#: ONNX Runtime's names of the element types, as its error texts show them.
_ELEMENT_NAMES = {
    DataType.FP16: "FLOAT16",
    DataType.FP32: "FLOAT",
    DataType.FP64: "DOUBLE",
    DataType.BYTES: "STRING",
    DataType.BF16: "BFLOAT16",
}
_ONNX_BFLOAT16 = 16

_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_EXECUTION_MODES = {0: ort.ExecutionMode.ORT_SEQUENTIAL, 1: ort.ExecutionMode.ORT_PARALLEL}

#: Option names of Triton's accelerator `tensorrt` that the provider knows under another one.
_TENSORRT_OPTIONS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_PRECISIONS = {"FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}
#: Those that are on or off and whose names do not end like it.
_TENSORRT_SWITCHES = {
    "trt_int8_use_native_calibration_table",
    "trt_dump_subgraphs",
    "trt_force_sequential_engine_build",
    "trt_layer_norm_fp32_fallback",
    "trt_force_timing_cache",
    "trt_detailed_build_log",
    "trt_dump_ep_context_model",
    "trt_engine_hw_compatible",
}
_CUDNN_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
_ARENA_STRATEGIES = ("kNextPowerOfTwo", "kSameAsRequested")

#: The distributions of onnxruntime that contain a provider.
_BUILDS = {
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
    "CUDAExecutionProvider": "onnxruntime-gpu",
    "TensorrtExecutionProvider": "onnxruntime-gpu",
}

#: Of what all instances of this process compute on its CPUs, of whatever model.
_occupancy = Occupancy()

_STATUS = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """An input or output as the model declares it; -1 for dynamic extents."""

    datatype: DataType
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Sessions:
    """What runs a model. Several threads may do so at once."""

    #: For a batch that has all cores, and for one that has not; the latter follows the number of instances.
    alone: Any
    together: Any
    #: The cores that `together` has.
    cores: int
    #: What the last batch took.
    took_ns: int = WORTH_WAKING_NS


Conversion = Callable[[Any], Any]
Provider = tuple[str, dict[str, str]]


class OnnxRuntimeBackend(ArrayBackend):
    modules: ClassVar[tuple[str, ...]] = ("onnxruntime",)

    @classmethod
    def uses_gpus(cls) -> bool:
        return "CUDAExecutionProvider" in ort.get_available_providers()

    @classmethod
    def autocomplete(cls, model: ModelContext) -> ConfigDict | None:
        config = dict(model.config)
        has_inputs = bool(config.get("input") or config.get("batch_input"))
        has_outputs = bool(config.get("output"))
        if has_inputs and has_outputs:
            _log(
                model,
                f"skipping model configuration auto-complete for '{model.name}': inputs and outputs already specified",
            )
            return None
        options = _session_options(model, threads=1)
        # Only the signature is asked for; optimising the graph is most of the time a session takes to open.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = _open_session(model, first_instance(model), options)
        inputs, outputs = _infos(session.get_inputs()), _infos(session.get_outputs())

        batchable = all(info.shape[:1] == (-1,) for info in (*inputs.values(), *outputs.values()))
        max_batch_size = int(config.get("max_batch_size", 0))
        if batchable and max_batch_size == 0:
            max_batch_size = max(0, integer(model.settings.get("default-max-batch-size", "4")))
            config["max_batch_size"] = max_batch_size
            _log(
                model,
                f"autofilled max_batch_size to {max_batch_size} for model '{model.name}' since batching is supported but"
                " no max_batch_size is specified in model configuration. Must specify max_batch_size to utilize autofill"
                " with a larger max batch size",
            )
        elif not batchable and max_batch_size != 0:
            raise InvalidArgument(
                f"autofill failed for model '{model.name}': model does not support batching while non-zero max_batch_size"
                " is specified"
            )
        if max_batch_size > 1 and "sequence_batching" not in config and "dynamic_batching" not in config:
            config["dynamic_batching"] = {}
        # What the sequence batcher gives and takes is no input or output of clients.
        sequence = config.get("sequence_batching", {})
        states = sequence.get("state", ())
        given = {name for name, _ in control_inputs(config)} | {state["input_name"] for state in states}
        taken = {state["output_name"] for state in states}
        if not has_inputs:
            config["input"] = _configured(_without(inputs, given), max_batch_size > 0)
        if not has_outputs:
            config["output"] = _configured(_without(outputs, taken), max_batch_size > 0)
        return config

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        self._model_name = model.name
        if _can_share(model, instance):
            self._sessions = _shared_sessions(model, instance)
        else:
            cores = cores_per_instance(model.config)
            session = _open_session(model, instance, _session_options(model, cores))
            self._sessions = _Sessions(session, session, cores)
        self._occupancy = Occupancy() if instance.kind == "KIND_GPU" else _occupancy
        self._run_options = _run_options(model.parameters)
        session = self._sessions.alone
        inputs = _infos(session.get_inputs())
        optional = _infos(session.get_overridable_initializers())
        outputs = _infos(session.get_outputs())
        _check_controls(model, inputs)
        _check_inputs(model, inputs, optional)
        _check_outputs(model, outputs)

        self._input_conversions = _input_conversions(inputs | optional)
        self._output_conversions = _output_conversions(model.config, outputs)
        # numpy has no bfloat16, so ONNX Runtime hands such tensors out as its own values only; and it takes
        # text as arrays only. What needs both at once cannot be asked from Python.
        self._values_out = any(info.datatype is DataType.BF16 for info in outputs.values())
        if self._values_out and any(info.datatype is DataType.BYTES for info in (inputs | optional).values()):
            raise Unsupported(
                f"unable to load model '{model.name}': ONNX Runtime's Python interface cannot run a model that takes"
                " strings and answers BF16; cast one of them inside the model"
            )

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        feeds: dict[str, Any] = dict(inputs)
        for name, convert in self._input_conversions:
            if name in feeds:
                feeds[name] = convert(feeds[name])
        names = list(outputs)
        sessions = self._sessions
        is_free = self._occupancy.enter()
        session = sessions.alone if is_free and sessions.took_ns >= WORTH_WAKING_NS else sessions.together
        began_ns = perf_counter_ns()
        try:
            if self._values_out:
                arrays = self._run_values(session, names, feeds)
            else:
                arrays = session.run(names, feeds, self._run_options)
        except UnicodeDecodeError as error:
            raise Unsupported(
                f"model '{self._model_name}' answered {error.object[:20]!r}, which is not UTF-8; ONNX Runtime's Python"
                " interface hands out text only"
            ) from error
        except Exception as error:
            raise _translated(error) from error
        finally:
            sessions.took_ns = perf_counter_ns() - began_ns
            self._occupancy.leave()
        results: dict[str, Array] = dict(zip(names, arrays, strict=True))
        for name, convert in self._output_conversions:
            if name in results:
                results[name] = convert(results[name])
        return results

    def _run_values(self, session: Any, names: list[str], feeds: dict[str, Any]) -> list[Array]:
        values = {
            name: feed if isinstance(feed, ort.OrtValue) else ort.OrtValue.ortvalue_from_numpy(feed)
            for name, feed in feeds.items()
        }
        results = session.run_with_ort_values(names, values, self._run_options)
        return [_array(result) for result in results]

    def close(self) -> None:
        del self._sessions


# --- sessions ---------------------------------------------------------------------------------------------------


def _can_share(model: ModelContext, instance: InstanceContext) -> bool:
    """Not where somebody has said what a session is to have, nor where code of others would run in two threads."""
    parameters = model.parameters
    counts = (integer(parameters.get(f"{kind}_op_thread_count", "0")) for kind in ("intra", "inter"))
    has_own_operators = bool(model.config.get("model_operations", {}).get("op_library_filename"))
    return len(_providers(model, instance)) == 1 and not any(counts) and not has_own_operators


def _shared_sessions(model: ModelContext, instance: InstanceContext) -> _Sessions:
    """Two, since batches that run at once with the threads of all cores wait for each other's threads: they take an
    eighth longer than with so few threads that each has a core, with which a batch that runs alone takes much longer."""

    def open_with(cores: int) -> Any:
        return _open_session(model, instance, _session_options(model, cores))

    def open_one() -> _Sessions:
        cores = available_cores()
        session = open_with(cores)
        return _Sessions(session, session, cores)

    sessions = model.shared("sessions", open_one)
    left = cores_left_to_all(model.config)
    if left != sessions.cores and not _has_global_threads(model):
        # Instances that are there already use it from their next batch on.
        sessions.together = sessions.alone if left == available_cores() else open_with(left)
        sessions.cores = left
    return sessions


def _open_session(model: ModelContext, instance: InstanceContext, options: Any) -> Any:
    path = model.path / "model.onnx" if model.path.is_dir() else model.path
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{model.name}'")
    providers = _providers(model, instance)
    # Before libraries of operators, which may need them.
    _load_gpu_libraries(*(name for name, _ in providers))
    for library in model.config.get("model_operations", {}).get("op_library_filename", ()):
        try:
            options.register_custom_ops_library(_library_path(model, library))
        except Exception as error:
            raise _translated(error) from error
    try:
        # Without "fallback": a session that quietly computes elsewhere than asked is a puzzle, not a service.
        session = ort.InferenceSession(
            str(path),
            options,
            providers=[name for name, _ in providers],
            provider_options=[values for _, values in providers],
            enable_fallback=0,
        )
    except Exception as error:
        raise _translated(error) from error
    started = session.get_providers()
    for name, _ in providers:
        if name not in started:
            raise Unavailable(
                f"unable to load model '{model.name}': {name} could not be started (its libraries or device are"
                f" missing; the lines above say which); started: {', '.join(started)}"
            )
    return session


@functools.cache
def _load_gpu_libraries(*providers: str) -> None:
    """Once per process: those that come from PyPI, in packages that the loader does not know."""
    if "CUDAExecutionProvider" in providers and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    if "TensorrtExecutionProvider" in providers:
        # It loads its libraries when it is imported.
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module("tensorrt_libs")


def _library_path(model: ModelContext, library: str) -> str:
    """A custom operator library: a path, or a file of the model; a bare name is looked for like any library."""
    in_model = model.directory / library
    return str(in_model) if not Path(library).is_absolute() and in_model.is_file() else library


def _session_options(model: ModelContext, threads: int) -> Any:
    parameters = model.parameters
    options = ort.SessionOptions()
    level = int(model.config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = _GRAPH_LEVELS.get(level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)

    mode = integer(parameters.get("execution_mode", "0"))
    if mode not in _EXECUTION_MODES:
        raise InvalidArgument(
            f"Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got {mode} ."
        )
    options.execution_mode = _EXECUTION_MODES[mode]

    if _has_global_threads(model):
        _start_global_threads(
            integer(model.settings.get("intra_op_thread_count", "0")),
            integer(model.settings.get("inter_op_thread_count", "0")),
        )
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = integer(parameters.get("intra_op_thread_count", "0")) or threads
        options.inter_op_num_threads = integer(parameters.get("inter_op_thread_count", "0"))
        # Threads spin for more work while a batch runs, which is fast; between batches they would take the
        # cores from the server and from other hosts.
        options.add_session_config_entry("session.force_spinning_stop", "1")

    options.enable_cpu_mem_arena = _boolean(parameters.get("enable_mem_arena", "1"))
    options.enable_mem_pattern = _boolean(parameters.get("enable_mem_pattern", "1"))
    for key, value in parameters.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, value)
    return options


def _has_global_threads(model: ModelContext) -> bool:
    return _boolean(model.settings.get("enable-global-threadpool", "0"))


@functools.cache
def _start_global_threads(intra: int, inter: int) -> None:
    """Once per process, before its first session; from then on all sessions share the pool."""
    ort.set_global_thread_pool_sizes(intra, inter)


def _run_options(parameters: Mapping[str, str]) -> Any:
    shrinkage = parameters.get("memory.enable_memory_arena_shrinkage")
    if shrinkage is None:
        return None
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrinkage)
    return options


# --- execution providers ----------------------------------------------------------------------------------------


def _providers(model: ModelContext, instance: InstanceContext) -> list[Provider]:
    """The execution providers with their options, most wanted first. Raises where one is unknown or not installed."""
    accelerators = model.config.get("optimization", {}).get("execution_accelerators", {})
    providers: list[Provider] = []
    if instance.kind == "KIND_GPU":
        device = {"device_id": str(instance.device_id)}
        cuda = _cuda_options(model.parameters)
        for accelerator in accelerators.get("gpu_execution_accelerator", ()):
            name, parameters = accelerator["name"], accelerator.get("parameters", {})
            if name == "tensorrt":
                providers.append(("TensorrtExecutionProvider", _tensorrt_options(parameters) | device))
            elif name == "cuda":
                cuda |= parameters
            else:
                raise InvalidArgument(f"unknown Execution Accelerator '{name}' is requested")
        providers.append(("CUDAExecutionProvider", cuda | device))
    for accelerator in accelerators.get("cpu_execution_accelerator", ()):
        if accelerator["name"] != "openvino":
            raise InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
        providers.append(("OpenVINOExecutionProvider", {"device_type": "CPU"} | accelerator.get("parameters", {})))

    available = ort.get_available_providers()
    for provider, _ in providers:
        if provider not in available:
            raise Unsupported(
                f"unable to load model '{model.name}': it asks for the {provider}, and the installed onnxruntime"
                f" {ort.__version__} offers {', '.join(available)}. The distribution {_BUILDS[provider]} has it: install"
                " it in place of onnxruntime"
            )
    return [*providers, ("CPUExecutionProvider", {})]


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value in _TENSORRT_PRECISIONS:
                options[_TENSORRT_PRECISIONS[value]] = "True"
            elif value != "FP32":
                raise InvalidArgument(f"unsupported precision mode '{value}' is requested")
        elif key in _TENSORRT_OPTIONS:
            options[_TENSORRT_OPTIONS[key]] = value
        elif key.startswith("trt_"):
            options[key] = value
        else:
            raise InvalidArgument(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    for key, value in options.items():
        if key.endswith("_enable") or key in _TENSORRT_SWITCHES:
            # The Python interface takes no other words than these; Triton's, in C, takes numbers too.
            options[key] = str(_boolean(value))
    return options


def _cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """Options of the CUDA provider among the model's parameters, an older place for them."""
    options: dict[str, str] = {}
    if "cudnn_conv_algo_search" in parameters:
        options["cudnn_conv_algo_search"] = _choice("cudnn_conv_algo_search", parameters, _CUDNN_SEARCHES)
    if "arena_extend_strategy" in parameters:
        options["arena_extend_strategy"] = _choice("arena_extend_strategy", parameters, _ARENA_STRATEGIES)
    for key in ("gpu_mem_limit", "do_copy_in_default_stream"):
        if key in parameters:
            options[key] = parameters[key]
    return options


def _choice(key: str, parameters: Mapping[str, str], choices: Sequence[str]) -> str:
    number = integer(parameters[key])
    if not 0 <= number < len(choices):
        raise InvalidArgument(f"unsupported {key} value '{number}' is requested")
    return choices[number]


# --- the model's signature ----------------------------------------------------------------------------------------


def _infos(nodes: Iterable[Any]) -> dict[str, _TensorInfo]:
    return {node.name: _info(node) for node in nodes}


def _info(node: Any) -> _TensorInfo:
    datatype = _TENSOR_TYPES.get(node.type)
    if datatype is None:
        constructor = node.type.partition("(")[0]
        if constructor == "tensor":
            raise Unsupported(f"unsupported element type '{node.type}' of I/O '{node.name}'")
        raise Unsupported(
            f"Unsupported ONNX Type '{_OTHER_TYPES.get(constructor, 'ONNX_TYPE_UNKNOWN')}' for I/O '{node.name}',"
            " expected 'ONNX_TYPE_TENSOR'."
        )
    # Dynamic extents have a name, or None.
    return _TensorInfo(datatype, tuple(dim if isinstance(dim, int) else -1 for dim in node.shape))


def _without(infos: Mapping[str, _TensorInfo], names: set[str]) -> dict[str, _TensorInfo]:
    return {name: info for name, info in infos.items() if name not in names}


def _configured(infos: Mapping[str, _TensorInfo], batching: bool) -> list[dict[str, Any]]:
    """The `input` or `output` of a configuration that a model's own declares."""
    tensors = []
    for name, info in infos.items():
        tensor: dict[str, Any] = {"name": name, "data_type": info.datatype.config_name}
        dims = list(info.shape[1:] if batching else info.shape)
        tensor["dims"] = dims or [1]
        if not dims and batching:
            tensor["reshape"] = {"shape": []}
        tensors.append(tensor)
    return tensors


def _check_inputs(
    model: ModelContext, required: Mapping[str, _TensorInfo], optional: Mapping[str, _TensorInfo]
) -> None:
    config = model.config
    batching = int(config.get("max_batch_size", 0)) > 0
    sequence = config.get("sequence_batching", {})
    expected = (
        sum(not tensor.get("optional") for tensor in config.get("input", ()))
        + len(config.get("batch_input", ()))
        + len(control_inputs(config))
        + len(sequence.get("state", ()))
    )
    if len(required) != expected:
        raise InvalidArgument(
            f"unable to load model '{model.name}', configuration expects {expected} inputs, model provides {len(required)}"
        )
    infos = {**required, **optional}
    for tensor in config.get("input", ()):
        name = tensor["name"]
        if tensor.get("optional") and batching:
            raise InvalidArgument(
                f"unable to load model '{model.name}', optional input '{name}' is not supported for models that support"
                " batching"
            )
        info = infos.get(name)
        if info is None:
            raise InvalidArgument(
                f"unexpected inference input '{name}', allowed inputs are: {', '.join(sorted(infos))}"
            )
        _check_datatype(model, f"input '{name}'", tensor["data_type"], info)
        if tensor.get("allow_ragged_batch"):
            _check_ragged(model, tensor, info)
        else:
            _check_dims(model, name, info.shape, framework_dims(tensor), batching, exact=False)


def _check_ragged(model: ModelContext, tensor: Mapping[str, Any], info: _TensorInfo) -> None:
    name = tensor["name"]
    if tensor.get("optional"):
        raise InvalidArgument(
            f"unable to load model '{model.name}', configuration expects model provides input with shape [-1] for ragged"
            f" input '{name}', which is not supported for optional input"
        )
    if info.shape != (-1,):
        raise InvalidArgument(
            f"unable to load model '{model.name}', configuration expects model provides input with shape [-1]  for ragged"
            f" input '{name}', model provides {shape_text(info.shape)}"
        )


def _check_outputs(model: ModelContext, infos: Mapping[str, _TensorInfo]) -> None:
    config = model.config
    batching = int(config.get("max_batch_size", 0)) > 0
    of_batch = {name for output in config.get("batch_output", ()) for name in output.get("target_name", ())}
    for tensor in config.get("output", ()):
        name = tensor["name"]
        _check_datatype(model, f"output '{name}'", tensor["data_type"], _output_info(infos, name))
        if name not in of_batch:
            _check_dims(model, name, infos[name].shape, framework_dims(tensor), batching, exact=True)
    for state in config.get("sequence_batching", {}).get("state", ()):
        name = state["output_name"]
        _check_datatype(model, f"output state '{name}'", state["data_type"], _output_info(infos, name))


def _output_info(infos: Mapping[str, _TensorInfo], name: str) -> _TensorInfo:
    if name not in infos:
        raise InvalidArgument(f"unexpected inference output '{name}', allowed outputs are: {', '.join(sorted(infos))}")
    return infos[name]


def _check_datatype(model: ModelContext, what: str, configured: str, info: _TensorInfo) -> None:
    if configured != info.datatype.config_name:
        # The one place where Triton writes TYPE_ before its protocol's name: a string tensor is TYPE_BYTES here.
        raise InvalidArgument(
            f"unable to load model '{model.name}', configuration expects datatype {configured} for {what}, model provides"
            f" TYPE_{info.datatype.name}"
        )


def _check_dims(
    model: ModelContext, name: str, shape: tuple[int, ...], dims: tuple[int, ...], batching: bool, exact: bool
) -> None:
    """`exact`: the configuration may not fix an extent that the model leaves open."""
    if not shape:
        if any(dim != 1 for dim in dims):
            raise InvalidArgument(
                f"unable to load model '{model.name}', scalar tensor '{name}', should only provide 1 in the model"
                f" configuration when the model doesn't support batching. Model configuration provided: {shape_text(dims)}."
            )
        return
    if batching and shape[0] != -1:
        raise InvalidArgument(
            f"model '{model.name}', tensor '{name}': for the model to support batching the shape should have at least 1"
            f" dimension and the first dimension must be -1; but shape expected by the model is {shape_text(shape)}"
        )
    full = (-1, *dims) if batching else dims
    if len(shape) == len(full) and all(
        got == wanted or (wanted == -1 and not exact) for got, wanted in zip(full, shape, strict=True)
    ):
        return
    raise wrong_dims(model.name, name, shape, full, batching)


def _check_controls(model: ModelContext, infos: Mapping[str, _TensorInfo]) -> None:
    first = 1 if int(model.config.get("max_batch_size", 0)) > 0 else 0
    for name, data_type in control_inputs(model.config):
        info = infos.get(name)
        if info is None:
            raise Internal(f"configuration specified sequence control '{name}', but model does not provide that input")
        if info.shape[first:] != (1,):
            raise InvalidArgument(
                f"unable to load model '{model.name}', sequence control '{name}' in model has dims"
                f" {shape_text(info.shape[first:])} but dims [1] is expected"
            )
        if data_type != info.datatype.config_name:
            raise InvalidArgument(
                f"unable to load model '{model.name}', sequence control '{name}', the model expects data-type"
                f" {_ELEMENT_NAMES.get(info.datatype, info.datatype.name)} but the model configuration specifies data-type"
                f" {data_type}"
            )


# --- conversions --------------------------------------------------------------------------------------------------


def _input_conversions(infos: Mapping[str, _TensorInfo]) -> list[tuple[str, Conversion]]:
    conversions: list[tuple[str, Conversion]] = []
    for name, info in infos.items():
        if not info.shape:
            conversions.append((name, _to_scalar))
        if info.datatype is DataType.BYTES:
            conversions.append((name, functools.partial(to_text, tensor=name)))
        elif info.datatype is DataType.BF16:
            conversions.append((name, _bfloat16_value))
    return conversions


def _output_conversions(config: ConfigDict, infos: Mapping[str, _TensorInfo]) -> list[tuple[str, Conversion]]:
    texts = [(name, from_text) for name, info in infos.items() if info.datatype is DataType.BYTES]
    scalars = [
        (tensor["name"], functools.partial(_from_scalar, dims=framework_dims(tensor)))
        for tensor in config.get("output", ())
        if not infos[tensor["name"]].shape
    ]
    return [*texts, *scalars]


def _to_scalar(array: Array) -> Array:
    # Not when the rank is merely undeclared, which looks the same: such an input may hold any number of elements.
    return array.reshape(()) if array.size == 1 else array


def _from_scalar(array: Array, dims: tuple[int, ...]) -> Array:
    return array.reshape(dims) if array.ndim == 0 else array


def _bfloat16_value(array: Array) -> Any:
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)


def _array(value: Any) -> Array:
    """A copy of an OrtValue's elements."""
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()  # type: ignore[no-any-return]
    size = value.tensor_size_in_bytes()
    elements = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bytearray(elements), ml_dtypes.bfloat16).reshape(value.shape())


# --- small things --------------------------------------------------------------------------------------------------


def _translated(error: Exception) -> NaiadError:
    """ONNX Runtime's exception as the error, and with the text, that Triton makes of its status."""
    if isinstance(error, NaiadError):
        return error
    status = _STATUS.match(str(error))
    if status is None:
        return Internal(str(error))
    code, text = status.groups()
    return Internal(f"onnx runtime error {code}: {text}")


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "on", "1"):
        return True
    if lowered in ("false", "off", "0"):
        return False
    raise InvalidArgument(f"failed to convert '{text}' to boolean value")


def _log(model: ModelContext, message: str) -> None:
    model.services.log("INFO", message, "onnxruntime.py", sys._getframe(1).f_lineno)
