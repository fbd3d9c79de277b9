"""The backend `openvino`: whatever OpenVINO reads, one compiled model per version. Runs in hosts, on instances' threads.

It reads IR (model.xml), ONNX, TensorFlow SavedModels and frozen graphs, TensorFlow Lite and Paddle, by their suffix.
Parameters and texts are those of Triton's OpenVINO backend. All instances share what is compiled; each has infer
requests of its own. Unless the configuration says otherwise, a model with several instances is compiled twice: for a
batch that has no other beside it, which gets all cores, and with a stream for each instance, so that they overlap.
A model with state (variables) is compiled once: its state lives in the infer request, so an instance has only one.

Kept better than Triton has it: batches of any size up to `max_batch_size` run, at the cost of nothing, where the
model's operations allow it; only a model with its batch size built in asks for exactly that one (then, and only then,
ENABLE_BATCH_PADDING is of use, or where a compiled batch of one size is the faster one). BF16 and numbers without
dimensions work, and models with FP64 do as FP32. CPUs with bfloat16 do not compute in it unless HINT_BF16 says so: an
answer is not to depend on the machine. Threads are as many as the container's cores and are not pinned, since hosts
share the cores. As in Triton, OpenVINO's CPU computes INT64 in INT32, and there are no strings.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np

from naiad.backends.api import Array, ArrayBackend, ConfigDict, InstanceContext, ModelContext
from naiad.backends.configured import framework_dims, wrong_dims
from naiad.backends.cores import WORTH_WAKING_NS, Occupancy, available_cores
from naiad.datatypes import BY_CONFIG_NAME, DataType
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable, Unsupported

# Importing openvino reports it to Intel, from a thread, where this package is. A server does not phone home unasked,
# and a zygote must not have that thread when it forks. None makes its import fail, which openvino takes well.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino as ov  # noqa: E402 - after the line above

T = TypeVar("T")

_VERSION = ov.__version__.partition("-")[0]

#: By the name of OpenVINO's element type.
_ELEMENT_TYPES = {
    "boolean": DataType.BOOL,
    "u8": DataType.UINT8,
    "u16": DataType.UINT16,
    "u32": DataType.UINT32,
    "u64": DataType.UINT64,
    "i8": DataType.INT8,
    "i16": DataType.INT16,
    "i32": DataType.INT32,
    "i64": DataType.INT64,
    "f16": DataType.FP16,
    "f32": DataType.FP32,
    "bf16": DataType.BF16,
    # OpenVINO computes it in FP32. So that nobody takes FP32's digits for more, that is what goes in and out.
    "f64": DataType.FP32,
}
_ELEMENTS = {datatype: getattr(ov.Type, name) for name, datatype in _ELEMENT_TYPES.items() if name != "f64"}

_DEFAULT_FILENAME = "model.xml"
#: Looked for, in this order, where there is no model.xml and the configuration names no file.
_OTHER_FILENAMES = (
    "model.savedmodel",
    "model.saved_model",
    "model.onnx",
    "model.graphdef",
    "model.pb",
    "model.tflite",
    "model.pdmodel",
)
#: Suffix -> OpenVINO's name of the front end that reads it, and what people call the format.
_FRONT_ENDS = {
    ".xml": ("ir", "IR"),
    ".onnx": ("onnx", "ONNX"),
    ".savedmodel": ("tf", "TensorFlow"),
    ".saved_model": ("tf", "TensorFlow"),
    ".graphdef": ("tf", "TensorFlow"),
    ".pb": ("tf", "TensorFlow"),
    ".tflite": ("tflite", "TensorFlow Lite"),
    ".pdmodel": ("paddle", "Paddle"),
}

_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")

#: Of what all instances of this process compute, of whatever model.
_occupancy = Occupancy()


@dataclass(frozen=True, slots=True)
class _Port:
    """An input or output of the model. `shape` is None where even the rank is open; -1 for dynamic extents."""

    index: int
    name: str
    #: All it may be called in a configuration.
    names: frozenset[str]
    element: str
    shape: tuple[int, ...] | None

    @property
    def datatype(self) -> DataType | None:
        return _ELEMENT_TYPES.get(self.element)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An input or output of the configuration and where it is in the model."""

    name: str
    index: int
    datatype: DataType
    #: Rank 0 in the model, `dims` in the configuration.
    scalar: bool
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What all instances of a version share."""

    #: For a batch that has all cores, and for one that has not: the same where `streams` is 1.
    alone: Any
    together: Any
    streams: int
    #: Has variables, whose values are the infer request's.
    stateful: bool
    inputs: tuple[_Tensor, ...]
    outputs: Mapping[str, _Tensor]
    #: The one batch size that can run; None for any.
    batch: int | None
    padding: bool


class OpenVinoBackend(ArrayBackend):
    modules: ClassVar[tuple[str, ...]] = ("openvino",)
    extra: ClassVar[str] = "openvino"

    @classmethod
    def autocomplete(cls, model: ModelContext) -> ConfigDict | None:
        config = dict(model.config)
        graph = _read(model, _core(model))
        inputs, outputs = _ports(graph.inputs), _ports(graph.outputs)
        max_batch_size = int(config.get("max_batch_size", 0))
        if all(_has_batch_layout(port) for port in (*graph.inputs, *graph.outputs)):
            if max_batch_size == 0:
                max_batch_size = max(1, _number(model.settings.get("default-max-batch-size", "4"), "4"))
                config["max_batch_size"] = max_batch_size
                _log(
                    model,
                    "WARNING",
                    f"autofilled max_batch_size to {max_batch_size} for model '{model.name}' since batching is supported"
                    " but no max_batch_size is specified in model configuration. Must specify max_batch_size to utilize"
                    " autofill with a larger max batch size",
                )
            if max_batch_size > 1 and "sequence_batching" not in config and "dynamic_batching" not in config:
                config["dynamic_batching"] = {}
        elif max_batch_size == 0 and all(port.shape and port.shape[0] == -1 for port in (*inputs, *outputs)):
            _log(
                model,
                "INFO",
                f"model '{model.name}' has no layout that says which dimension is the batch, so its requests are not"
                " batched; if it is the first, set max_batch_size",
            )
        for side, ports in (("input", inputs), ("output", outputs)):
            if config.get(side):
                _log(
                    model,
                    "INFO",
                    f"skipping {side} model configuration auto-complete for '{model.name}': {side} already specified",
                )
            else:
                config[side] = [_configured(model, side, port, max_batch_size > 0) for port in ports]
        return config

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        if instance.kind != "KIND_CPU":
            raise InvalidArgument(
                f"unable to load model '{model.name}', Triton OpenVINO backend supports only Kind CPU and AUTO; another"
                " device is chosen by the parameter TARGET_DEVICE"
            )
        compiled = _compiled(model)
        self._model_name = model.name
        self._inputs = compiled.inputs
        self._outputs = compiled.outputs
        self._batch = compiled.batch
        self._padding = compiled.padding
        self._alone = self._together = _step("creating infer request object", compiled.alone.create_infer_request)
        if compiled.streams > 1:
            self._together = _step("creating infer request object", compiled.together.create_infer_request)
        #: What the last batch took.
        self._took_ns = WORTH_WAKING_NS

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        rows = 0
        if self._batch is not None:
            rows = len(inputs[self._inputs[0].name])
            if rows != self._batch and not (self._padding and rows < self._batch):
                advice = (
                    "setting 'ENABLE_BATCH_PADDING' parameter in model configuration to 'YES' at a performance cost."
                    if rows < self._batch
                    else f"setting 'max_batch_size' to {self._batch}, which the model has built in."
                )
                raise Internal(
                    f"expected requests with batch size '{self._batch}', got '{rows}'... this error can be avoided by"
                    f" {advice}"
                )
        is_free = _occupancy.enter()
        request = self._alone if is_free and self._took_ns >= WORTH_WAKING_NS else self._together
        began_ns = perf_counter_ns()
        tensors = []  # the request does not keep the arrays' memory
        try:
            for spec in self._inputs:
                array = inputs[spec.name]
                if rows != (self._batch or 0):
                    array = _padded(array, self._batch or 0)
                tensors.append(tensor := _tensor(array, spec))
                request.set_input_tensor(spec.index, tensor)
            request.infer()
            results = {name: _array(request.get_output_tensor(self._outputs[name].index), name) for name in outputs}
        except KeyError as error:
            raise InvalidArgument(
                f"model '{self._model_name}' needs all of its inputs, and there is no {error} in the request"
            ) from error
        except RuntimeError as error:
            raise Internal(f"openvino error in running inference : {_text(error)}") from error
        finally:
            self._took_ns = perf_counter_ns() - began_ns
            _occupancy.leave()
        for name, result in results.items():
            spec = self._outputs[name]
            if spec.scalar:
                results[name] = result.reshape(spec.dims)
            elif rows:
                if len(result) != self._batch:
                    raise Internal(
                        f"expected the batch size of openvino model output to be {self._batch}, got {len(result)}"
                    )
                results[name] = result[:rows]
        return results

    def close(self) -> None:
        del self._alone, self._together


# --- arrays -------------------------------------------------------------------------------------------------------


def _tensor(array: Array, spec: _Tensor) -> Any:
    """OpenVINO's view of an input; of a copy where it cannot take the memory as it is."""
    if not (array.flags.aligned and array.flags.writeable and array.flags.c_contiguous):
        array = np.array(array, order="C")
    if spec.scalar:
        array = array.reshape(())
    if spec.datatype is DataType.BF16:
        return ov.Tensor(array.view(np.uint16), ov.Shape(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def _array(tensor: Any, name: str) -> Array:
    """A view of an output: it is read before the request runs again."""
    array: Array = tensor.data
    return array.view(ml_dtypes.bfloat16) if tensor.element_type == ov.Type.bf16 else array


def _padded(array: Array, rows: int) -> Array:
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded


# --- reading and compiling ------------------------------------------------------------------------------------------


def _core(model: ModelContext) -> Any:
    core = _step("starting", ov.Core)
    extension = model.parameters.get("CPU_EXTENSION_PATH", "")
    if extension:
        in_model = model.directory / extension
        path = str(in_model) if not os.path.isabs(extension) and in_model.is_file() else extension
        _step("loading custom CPU extensions", lambda: core.add_extension(path))
        _log(model, "INFO", f"CPU extensions is loaded {path}")
    return core


def _read(model: ModelContext, core: Any) -> Any:
    path = model.path
    if path.name == _DEFAULT_FILENAME and not path.exists():
        others = (model.version_directory / name for name in _OTHER_FILENAMES)
        path = next((other for other in others if other.exists()), path)
    if not path.exists():
        raise Unavailable(f"unable to find '{path}' for model '{model.name}'")
    try:
        if path.suffix == ".onnx" and path.is_dir():
            path /= "model.onnx"
        return _step("reading model", lambda: core.read_model(path))
    except NaiadError:
        _check_front_end(model, path)
        raise


def _check_front_end(model: ModelContext, path: Path) -> None:
    """Raises where the installed OpenVINO lacks what reads this format: its own text does not say so."""
    front_end, format_name = _FRONT_ENDS.get(path.suffix, ("", ""))
    available = ov.frontend.FrontEndManager().get_available_front_ends()
    if front_end and front_end not in available:
        raise Unsupported(
            f"unable to load model '{model.name}': '{path}' needs OpenVINO's {format_name} front end, and the installed"
            f" openvino {_VERSION} has {', '.join(sorted(available)) or 'none'} only. The distribution 'openvino'"
            " of PyPI has them all"
        )


def _compiled(model: ModelContext) -> _Compiled:
    """As the first instance had it compiled, but with other streams where there are more or fewer instances by now."""
    streams = _streams(model)
    first = model.shared("compiled", lambda: _compile(model, streams))
    if first.stateful or streams == first.streams:
        return first
    if streams == 1:
        return replace(first, together=first.alone, streams=1)
    return model.shared(
        f"compiled with {streams} streams", lambda: replace(_compile(model, streams), alone=first.alone)
    )


def _compile(model: ModelContext, streams: int) -> _Compiled:
    device, properties = _device_properties(model)
    _log(model, "INFO", f"Target device {device}")
    core = _core(model)
    # Also where AUTO and the like have the CPU compute. The properties below come first.
    _step("loading model", lambda: core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"}))
    graph = _read(model, core)
    max_batch_size = int(model.config.get("max_batch_size", 0))
    parameters = model.parameters
    inputs = _matched_inputs(model, graph)
    # A device compiles inputs of an open rank for nobody.
    shapes = {
        tensor.index: _reshaped_layer(graph, tensor, max_batch_size > 0)
        for tensor in inputs
        if _yes(parameters, "RESHAPE_IO_LAYERS") or graph.inputs[tensor.index].partial_shape.rank.is_dynamic
    }
    if shapes:
        _step("setting shape of inputs", lambda: graph.reshape(shapes))
    _check_shapes(model, graph.inputs, inputs, max_batch_size, exact=False)
    batch: int | None = None
    if max_batch_size > 0:
        if _yes(parameters, "SKIP_OV_DYNAMIC_BATCHSIZE"):
            batch = _fixed_batch(graph)
        else:
            graph, batch = _with_batch(graph, max_batch_size, _yes(parameters, "ENABLE_BATCH_PADDING"))
    outputs = _matched_outputs(model, graph)
    _check_shapes(model, graph.outputs, outputs, batch or max_batch_size, exact=True)
    graph = _with_configured_types(graph, inputs, outputs)
    stateful = bool(graph.get_variables())
    if stateful:
        streams = 1

    try:
        _drop_unknown(model, core, device, properties)
        alone = together = _step("loading model", lambda: core.compile_model(graph, device, properties))
        if streams > 1:
            # Of the same graph, with which it shares the weights as they were read.
            shares = properties | {"NUM_STREAMS": streams}
            together = _step("loading model", lambda: core.compile_model(graph, device, shares))
    except Internal as error:
        raise Internal(
            f"{error.message} (TARGET_DEVICE is {device}; OpenVINO {_VERSION} finds"
            f" {', '.join(core.available_devices) or 'no device'} on this machine)"
        ) from error
    return _Compiled(
        alone,
        together,
        streams,
        stateful,
        inputs,
        {tensor.name: tensor for tensor in outputs},
        batch,
        _yes(parameters, "ENABLE_BATCH_PADDING"),
    )


def _drop_unknown(model: ModelContext, core: Any, device: str, properties: dict[str, Any]) -> None:
    """Takes out what the CPU of some versions of OpenVINO does not have, which is no reason not to serve."""
    key = "COMPILATION_NUM_THREADS"
    if key in properties and device == "CPU":
        known = _step("loading model", lambda: core.get_property(device, "SUPPORTED_PROPERTIES"))
        if key not in known:
            _log(model, "WARNING", f"OpenVINO's {device} has no {key}: {properties.pop(key)} is not used")


def _device_properties(model: ModelContext) -> tuple[str, dict[str, Any]]:
    """The device, and what it is compiled with."""
    parameters = model.parameters
    device = parameters.get("TARGET_DEVICE", "").upper() or "CPU"
    properties: dict[str, Any] = {}
    for key in ("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS"):
        if value := parameters.get(key, "").lower():
            if not _is_number(value):
                raise InvalidArgument(f"expected the parameter '{key}' to be a non-negative number, got {value}")
            properties[key] = int(value)
    if value := parameters.get("HINT_BF16", "").lower():
        if value != "yes":
            raise InvalidArgument(f"expected the parameter 'HINT_BF16' to be YES, got {value}")
        properties["INFERENCE_PRECISION_HINT"] = "bf16"
    if value := parameters.get("NUM_STREAMS", "").lower():
        if value not in ("auto", "numa") and not _is_number(value):
            raise InvalidArgument(
                f"expected the parameter 'NUM_STREAMS' to be either AUTO/NUMA/<int_value>, got {value}"
            )
        properties["NUM_STREAMS"] = int(value) if _is_number(value) else value.upper()
    if value := parameters.get("PERFORMANCE_HINT", "").lower():
        if value.upper() not in _HINTS:
            raise InvalidArgument(f"expected the parameter 'PERFORMANCE_HINT' to be {'/'.join(_HINTS)}, got {value}")
        properties["PERFORMANCE_HINT"] = value.upper()
    if folder := parameters.get("CACHE_DIR", "") or model.settings.get("cache-dir", ""):
        properties["CACHE_DIR"] = str(model.directory / folder)
    if device == "CPU":
        properties.setdefault("INFERENCE_NUM_THREADS", available_cores())
        properties["ENABLE_CPU_PINNING"] = False
    return device, properties


def _streams(model: ModelContext) -> int:
    """In how many shares the threads are divided while several instances compute; 1 where they are not, or where it is
    not for us to say: the configuration does, or the device is another one than the CPU."""
    device, properties = _device_properties(model)
    if device != "CPU" or not properties.keys().isdisjoint({"NUM_STREAMS", "PERFORMANCE_HINT"}):
        return 1
    instances = sum(int(group.get("count", 1)) for group in model.config.get("instance_group", ()))
    return min(instances, properties["INFERENCE_NUM_THREADS"] or available_cores())


# --- batches and shapes -------------------------------------------------------------------------------------------


def _with_batch(graph: Any, max_batch_size: int, padding: bool) -> tuple[Any, int | None]:
    """The model for batches of any size, and None; where that cannot be, or for padding, for one size, and that."""
    if not padding:
        if _first_extents(graph.outputs) <= {-1, None} and _first_extents(graph.inputs) <= {-1, None}:
            return graph, None
        dynamic = graph.clone()  # a failed reshape leaves a model half changed
        try:
            dynamic.reshape(_batch_shapes(dynamic, -1))
            if _first_extents(dynamic.outputs) <= {-1, None}:
                return dynamic, None
        except RuntimeError:
            pass  # its operations know their batch size
    _step("setting max batch size", lambda: graph.reshape(_batch_shapes(graph, max_batch_size)))
    return graph, max_batch_size


def _batch_shapes(graph: Any, batch: int) -> dict[int, Any]:
    shapes = {}
    for index, port in enumerate(graph.inputs):
        shape = port.partial_shape
        if shape.rank.is_static and len(shape):
            shape[0] = ov.Dimension(batch)
        shapes[index] = shape
    return shapes


def _first_extents(ports: Sequence[Any]) -> set[int | None]:
    """-1 for dynamic, None for an open rank, 0 for a scalar."""
    shapes = [_shape(port) for port in ports]
    return {None if shape is None else (shape[0] if shape else 0) for shape in shapes}


def _fixed_batch(graph: Any) -> int | None:
    """The batch size a model has of its own."""
    fixed = [extent for extent in _first_extents(graph.inputs) if extent is not None and extent > 0]
    return fixed[0] if fixed else None


def _reshaped_layer(graph: Any, tensor: _Tensor, batching: bool) -> Any:
    if any(dim == 0 or dim < -1 for dim in tensor.dims):
        raise Internal("openvino backend does not support dimensions values other than `-1` or positive integers")
    shape = graph.inputs[tensor.index].partial_shape
    first = [shape[0] if shape.rank.is_static and len(shape) else ov.Dimension(-1)] if batching else []
    return ov.PartialShape([*first, *(ov.Dimension(dim) for dim in tensor.dims)])


def _check_shapes(
    model: ModelContext, ports: Sequence[Any], tensors: Sequence[_Tensor], max_batch_size: int, exact: bool
) -> None:
    """`exact`: the first extent counts too, and -1 in the configuration is no match for a fixed extent."""
    for tensor in tensors:
        shape = ports[tensor.index].partial_shape
        if shape.rank.is_dynamic:
            continue
        where = f"model '{model.name}', tensor '{tensor.name}'"
        if max_batch_size > 0 and len(shape) == 0:
            raise InvalidArgument(
                f"{where}: for the model to support batching the shape should have at least 1 dimension"
            )
        if tensor.scalar:
            if any(dim != 1 for dim in tensor.dims):
                raise InvalidArgument(f"{where}: the model has a single number, whose dims can be [1] only")
            continue
        full = (max_batch_size, *tensor.dims) if max_batch_size > 0 else tensor.dims
        skipped = not exact and max_batch_size > 0
        if len(full) == len(shape) and all(
            _fits(extent, dim) or (skipped and (position == 0 or dim == -1))
            for position, (extent, dim) in enumerate(zip(shape, full, strict=True))
        ):
            continue
        error = wrong_dims(model.name, tensor.name, _extents(shape), full, max_batch_size > 0)
        if any(extent.is_dynamic and extent != ov.Dimension.dynamic() for extent in shape):
            raise InvalidArgument(f"{error.message}; the model has bounds: {shape}")
        raise error


def _fits(extent: Any, dim: int) -> bool:
    """Whether a configured `dim` may meet the model's `extent`, which may be dynamic, within bounds."""
    if extent.is_static:
        return bool(extent.get_length() == dim)
    upper = extent.get_max_length()
    return dim == -1 or (dim >= extent.get_min_length() and (upper == -1 or dim <= upper))


# --- inputs and outputs ---------------------------------------------------------------------------------------------


def _ports(ports: Sequence[Any]) -> list[_Port]:
    return [_port(index, port) for index, port in enumerate(ports)]


def _port(index: int, port: Any) -> _Port:
    node = port.node.get_friendly_name()
    names = set(port.names)
    name = port.any_name if names else node
    if port.node.get_type_name() == "Parameter":
        names.add(node)  # the only name of its own, where the model hands it on as an output
    # Frozen graphs have "image:0" for what TensorFlow's users call "image".
    names |= {name, *(other.removesuffix(":0") for other in names)}
    return _Port(index, name, frozenset(names), port.element_type.get_type_name(), _shape(port))


def _shape(port: Any) -> tuple[int, ...] | None:
    shape = port.partial_shape
    return None if shape.rank.is_dynamic else _extents(shape)


def _extents(shape: Any) -> tuple[int, ...]:
    return tuple(extent.get_length() if extent.is_static else -1 for extent in shape)


def _has_batch_layout(port: Any) -> bool:
    layout = ov.layout_helpers.get_layout(port)
    return bool(ov.layout_helpers.has_batch(layout)) and ov.layout_helpers.batch_idx(layout) == 0


def _configured(model: ModelContext, side: str, port: _Port, batching: bool) -> dict[str, Any]:
    """The `input` or `output` of a configuration that the model's own declares."""
    if port.datatype is None:
        raise Unsupported(f"unsupported datatype {port.element} for {side} '{port.name}' for model '{model.name}'")
    if port.shape is None:
        raise InvalidArgument(
            f"autofill failed for model '{model.name}': the model leaves the number of dimensions of {side} '{port.name}'"
            " open; give its dims in the configuration"
        )
    dims = list(port.shape[1:] if batching else port.shape)
    tensor: dict[str, Any] = {"name": port.name, "data_type": port.datatype.config_name, "dims": dims or [1]}
    if not dims and batching:
        tensor["reshape"] = {"shape": []}
    return tensor


def _matched_inputs(model: ModelContext, graph: Any) -> tuple[_Tensor, ...]:
    configured = model.config.get("input", ())
    if len(graph.inputs) != len(configured):
        raise InvalidArgument(
            f"unable to load model '{model.name}', configuration expects {len(configured)} inputs, model provides"
            f" {len(graph.inputs)}"
        )
    return tuple(_matched(model, "input", tensor, _ports(graph.inputs)) for tensor in configured)


def _matched_outputs(model: ModelContext, graph: Any) -> tuple[_Tensor, ...]:
    ports = _ports(graph.outputs)
    return tuple(_matched(model, "output", tensor, ports) for tensor in model.config.get("output", ()))


def _matched(model: ModelContext, side: str, tensor: Mapping[str, Any], ports: Sequence[_Port]) -> _Tensor:
    name = tensor["name"]
    port = next((port for port in ports if name in port.names), None)
    if port is None:
        names = ", ".join(sorted(port.name for port in ports))
        raise InvalidArgument(f"unexpected inference {side} '{name}', allowed {side}s are: {names}")
    datatype = BY_CONFIG_NAME.get(tensor["data_type"])
    if datatype not in _ELEMENTS or port.datatype is None:
        wrong = tensor["data_type"] if datatype not in _ELEMENTS else port.element
        raise Internal(f"unsupported datatype {wrong} for {side} '{name}' for model '{model.name}'")
    batching = int(model.config.get("max_batch_size", 0)) > 0
    return _Tensor(name, port.index, datatype, port.shape == () and not batching, framework_dims(tensor))


def _with_configured_types(graph: Any, inputs: Sequence[_Tensor], outputs: Sequence[_Tensor]) -> Any:
    """The model with conversions where the configuration has another data type than it, as in Triton."""
    steps = ov.preprocess.PrePostProcessor(graph)
    changed = False
    for tensor in inputs:
        if graph.inputs[tensor.index].element_type != _ELEMENTS[tensor.datatype]:
            steps.input(tensor.index).tensor().set_element_type(_ELEMENTS[tensor.datatype])
            changed = True
    for tensor in outputs:
        if graph.outputs[tensor.index].element_type != _ELEMENTS[tensor.datatype]:
            steps.output(tensor.index).tensor().set_element_type(_ELEMENTS[tensor.datatype])
            changed = True
    return _step("apply model preprocessing", steps.build) if changed else graph


# --- small things ---------------------------------------------------------------------------------------------------


def _step(step: str, do: Callable[[], T]) -> T:
    """`do()`, its exception as the error that Triton makes of it."""
    try:
        return do()
    except NaiadError:
        raise
    except Exception as error:
        raise Internal(f"openvino error in {step} : {_text(error)}") from error


def _text(error: Exception) -> str:
    """OpenVINO's text without the lines that say where in its sources it was thrown."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception from src/")]
    return " ".join(said) or str(error).strip()


def _yes(parameters: Mapping[str, str], key: str) -> bool:
    return parameters.get(key, "").lower() == "yes"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _number(text: str, default: str) -> int:
    return int(text if _is_number(text) else default)


def _log(model: ModelContext, level: Any, message: str) -> None:
    model.services.log(level, message, "openvino.py", sys._getframe(1).f_lineno)
