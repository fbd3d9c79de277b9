"""SavedModels and GraphDefs: what they declare, and sessions that have them loaded. Runs in hosts.

Sessions of TensorFlow 1's kind, which the current one still has: a session has its own thread pools, variables and
placement, can be shared by instances, and runs the functions of TensorFlow 2 as well.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import config_pb2, error_codes_pb2
from tensorflow.python.saved_model import loader_impl

from naiad.backends.api import Array, InstanceContext, ModelContext
from naiad.backends.tensorflow.options import Options, log, session_config
from naiad.backends.tensorflow.signature import Signature, TensorInfo, sequence_states
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable, Unsupported

_DATATYPES = {
    tf.bool: DataType.BOOL,
    tf.uint8: DataType.UINT8,
    tf.uint16: DataType.UINT16,
    tf.uint32: DataType.UINT32,
    tf.uint64: DataType.UINT64,
    tf.int8: DataType.INT8,
    tf.int16: DataType.INT16,
    tf.int32: DataType.INT32,
    tf.int64: DataType.INT64,
    tf.float16: DataType.FP16,
    tf.float32: DataType.FP32,
    tf.float64: DataType.FP64,
    tf.string: DataType.BYTES,
}
_SERVE = "serve"
_SERVING_DEFAULT = "serving_default"
_NO_SERVING = ("__saved_model_init_op", "__saved_model_train_op")
#: Nodes at the end of a graph that are no outputs of it.
_NO_OUTPUTS = {"NoOp", "Const", "Assert", "Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}
_INPUTS = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")
#: Where branches of TensorFlow 1's control flow begin and end. What lies between is dead while another one is taken.
_SWITCHES = ("Switch", "RefSwitch")
_MERGES = ("Merge", "RefMerge")
_BRANCH_ENDS = (*_MERGES, "Exit", "RefExit")
#: How many nodes an error text lists; of larger graphs only the last ones.
_MANY_NODES = 64
#: Each choice of outputs is compiled for itself and takes memory; clients choose.
_MOST_CALLS = 32


# --- SavedModels --------------------------------------------------------------------------------------------------


def read_saved_model(model: ModelContext) -> Any:
    """TensorFlow's loader, which has read the file. Raises Internal with TensorFlow's reason."""
    try:
        return loader_impl.SavedModelLoader(str(model.path))
    except (OSError, DecodeError) as error:
        raise Internal(str(error)) from error


def served_signature(model: ModelContext, loader: Any, options: Options) -> tuple[Signature, list[str]]:
    """The signature that is to be served, and all tags of its graph. Raises NaiadError where there is none."""
    wanted = options.graph_tag or _SERVE
    graphs = [graph for graph in loader.saved_model.meta_graphs if wanted in graph.meta_info_def.tags]
    if not graphs:
        raise Internal(f"unable to load model '{model.name}', expected '{wanted}' tag")
    # A graph tagged with nothing else first.
    graph = min(graphs, key=lambda graph: len(graph.meta_info_def.tags))
    definition = graph.signature_def[_signature_name(model, graph.signature_def, options.signature_def)]
    signature = Signature(
        {name: _declared(model, "input", name, info) for name, info in sorted(definition.inputs.items())},
        {name: _declared(model, "output", name, info) for name, info in sorted(definition.outputs.items())},
    )
    return signature, list(graph.meta_info_def.tags)


def _signature_name(model: ModelContext, definitions: Mapping[str, Any], wanted: str) -> str:
    name = wanted or _SERVING_DEFAULT
    if name in definitions:
        return name
    others = [other for other in sorted(definitions) if other not in _NO_SERVING]
    if wanted or not others:
        there = ", ".join(map(repr, others)) or "none"
        raise Internal(
            f"unable to load model '{model.name}', expected '{name}' signature; signatures there are {there}"
        )
    log(model, "WARNING", f"model '{model.name}' has no signature '{name}', using signature '{others[0]}'")
    return others[0]


def _declared(model: ModelContext, what: str, name: str, info: Any) -> TensorInfo:
    if info.WhichOneof("encoding") != "name":
        raise Unsupported(
            f"unable to process {what} '{name}' for '{model.name}': it is a {info.WhichOneof('encoding')}, expected a tensor"
        )
    datatype = _datatype(tf.as_dtype(info.dtype))
    if datatype is None:
        raise Internal(
            f"unable to process {what} '{name}' for '{model.name}', unsupported datatype"
            f" '{type(info).DESCRIPTOR.fields_by_name['dtype'].enum_type.values_by_number[info.dtype].name}'"
        )
    shape = info.tensor_shape
    return TensorInfo(info.name, datatype, None if shape.unknown_rank else tuple(dim.size for dim in shape.dim))


# --- GraphDefs ----------------------------------------------------------------------------------------------------


def read_graph_def(model: ModelContext) -> Any:
    """Raises NaiadError where the file is no graph."""
    graph_def = tf.compat.v1.GraphDef()
    try:
        graph_def.ParseFromString(model.path.read_bytes())
    except DecodeError as error:
        raise Internal(f"unable to load model '{model.name}': {model.path} is not a GraphDef: {error}") from error
    if not graph_def.node:
        raise Internal(f"model {model.name} has an empty network")
    return graph_def


def graph_signature(model: ModelContext, graph: Any) -> Signature:
    """The placeholders of a graph, and of its other tensors those that the configuration names or nothing consumes;
    of the latter only those that there are whatever branches are taken."""
    operations = graph.get_operations()
    inputs: dict[str, TensorInfo] = {}
    natural: set[str] = set()
    for operation in operations:
        if operation.type in _INPUTS and (info := _tensor_info(operation.outputs[0])) is not None:
            inputs[operation.name] = info
            if operation.type != "PlaceholderWithDefault":
                natural.add(operation.name)
    outputs: dict[str, TensorInfo] = {}
    in_branches = _in_branches(operations)
    batchable = True
    for operation in operations:
        if operation.type in _NO_OUTPUTS or any(tensor.consumers() for tensor in operation.outputs):
            continue
        if operation.name in in_branches:
            batchable = False
            continue
        # The second output of a merge says which branch it was.
        for number, tensor in enumerate(operation.outputs[:1] if operation.type in _MERGES else operation.outputs):
            if (info := _tensor_info(tensor)) is not None:
                outputs[f"{operation.name}:{number}" if number else operation.name] = info
    natural.update(outputs)
    wanted = [tensor["name"] for tensor in model.config.get("output", ())]
    wanted += [state["output_name"] for state in sequence_states(model.config)]
    for name in wanted:
        if name not in outputs and (info := _named(graph, name)) is not None:
            outputs[name] = info
    others = [operation for operation in operations if operation.type not in _INPUTS and operation.outputs]
    names = tuple(operation.name for operation in others) if len(others) <= _MANY_NODES else ()
    return Signature(inputs, outputs, False, frozenset(natural), names, batchable)


def _in_branches(operations: Sequence[Any]) -> set[str]:
    """The names of the operations that are run in one branch only. Inputs come before what they are inputs of."""
    found: set[str] = set()
    if not _has_branches(operations):
        return found
    for operation in operations:
        if operation.type in _BRANCH_ENDS:
            continue
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        if operation.type in _SWITCHES or any(other.name in found for other in before):
            found.add(operation.name)
    return found


def _has_branches(operations: Sequence[Any]) -> bool:
    return any(operation.type in _SWITCHES for operation in operations)


def _named(graph: Any, name: str) -> TensorInfo | None:
    try:
        tensor = graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    except (KeyError, ValueError):
        return None
    return None if tensor.op.type in _INPUTS else _tensor_info(tensor)


def _tensor_info(tensor: Any) -> TensorInfo | None:
    datatype = _datatype(tensor.dtype)
    if datatype is None:
        return None
    shape = None if tensor.shape.rank is None else tuple(-1 if dim is None else dim for dim in tensor.shape.as_list())
    return TensorInfo(tensor.name, datatype, shape)


def import_graph_def(graph_def: Any, device: str | None, clear_devices: bool) -> Any:
    """The graph, on `device` unless its nodes say otherwise. Raises Internal with TensorFlow's reason."""
    if clear_devices:
        _clear_devices(graph_def)
    graph = tf.Graph()
    try:
        with graph.as_default(), graph.device(device):
            tf.import_graph_def(graph_def, name="")
    except (ValueError, tf.errors.OpError) as error:
        raise translated(error) from error
    return graph


def _clear_devices(graph_def: Any) -> None:
    """What was put on a CPU, tables too large for a GPU for one, stays there."""
    for node in graph_def.node:
        if "cpu" not in node.device.lower():
            node.device = ""


# --- sessions -----------------------------------------------------------------------------------------------------


class GraphSession:
    """A loaded model. May be run by several threads at a time.

    It is gone, with its variables and threads, when the last instance that has it is.
    """

    def __init__(self, model: ModelContext, instance: InstanceContext, options: Options, is_saved_model: bool) -> None:
        config = session_config(model, instance, options)
        self._calls: dict[tuple[tuple[str, ...], tuple[str, ...]], Call] = {}
        # KIND_MODEL leaves every node where the graph has it.
        placed = instance.kind != "KIND_MODEL"
        device = {"KIND_CPU": "/cpu:0", "KIND_GPU": f"/gpu:{instance.device_id}"}.get(instance.kind)
        try:
            if is_saved_model:
                loader = read_saved_model(model)
                self.signature, tags = served_signature(model, loader, options)
                graph = tf.Graph()
                self._session = tf.compat.v1.Session(graph=graph, config=config)
                self._check_device(model, instance)
                with graph.as_default(), graph.device(device):
                    self._load_saved_model(model, loader, graph, tags, clear_devices=placed)
            else:
                graph_def = read_graph_def(model)
                graph = import_graph_def(graph_def, device, clear_devices=placed)
                self.signature = graph_signature(model, graph)
                self._session = tf.compat.v1.Session(graph=graph, config=config)
                self._check_device(model, instance)
            self._bits = _bits(graph, self.signature)
            for name in options.init_operations:
                self._session.run(_operation(model, graph, name))
        except NaiadError:
            raise
        except Exception as error:
            raise translated(error) from error

    def _load_saved_model(
        self, model: ModelContext, loader: Any, graph: Any, tags: list[str], clear_devices: bool
    ) -> None:
        if clear_devices:
            _clear_devices(loader.get_meta_graph_def_from_tags(tags).graph_def)
        saver, _ = loader.load_graph(graph, tags)
        # Of a model that was frozen there may be what restores variables, and no file of them. TensorFlow's loader in
        # C++, which is Triton's, goes on; that in Python does not.
        if saver is None or (model.path / "variables" / "variables.index").is_file():
            loader.restore_variables(self._session, saver)
        else:
            log(model, "WARNING", f"the SavedModel of '{model.name}' has no variables, none were restored")
        loader.run_init_ops(self._session, tags)

    def call(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> "Call":
        """Runs the graph from `inputs` to `outputs`, names of the signature."""
        key = (inputs, outputs)
        call = self._calls.get(key)
        if call is None:
            feeds = [self.signature.inputs[name].tensor for name in inputs]
            fetches = [self.signature.outputs[name].tensor for name in outputs]
            try:
                call = Call(self._session, feeds, fetches, self._bits)
            except (ValueError, tf.errors.OpError) as error:
                raise translated(error) from error
            for oldest in list(self._calls)[: max(0, len(self._calls) + 1 - _MOST_CALLS)]:
                self._calls.pop(oldest, None)
            self._calls[key] = call
        return call

    def _check_device(self, model: ModelContext, instance: InstanceContext) -> None:
        if instance.kind != "KIND_GPU":
            return
        wanted = f"device:GPU:{instance.device_id}"
        devices = [device.name.partition("task:0/")[2] for device in self._session.list_devices()]
        if wanted not in devices:
            raise Unavailable(
                f"unable to load model '{model.name}': instance '{instance.name}' wants {wanted}, and TensorFlow"
                f" {tf.__version__} finds {', '.join(devices)}. The distribution tensorflow[and-cuda] finds GPUs,"
                " tensorflow-cpu none"
            )


class Call:
    """The graph between certain inputs and outputs, ready to run."""

    def __init__(
        self, session: Any, feeds: Sequence[str], fetches: Sequence[str], bits: Mapping[str, str] | None
    ) -> None:
        # What is fed cannot be fetched, and nothing twice; signatures may name a tensor more than once.
        computed = [fetch for fetch in dict.fromkeys(fetches) if fetch not in feeds]
        fetched = computed if bits is None else [bits.get(fetch, fetch) for fetch in computed]
        options = config_pb2.CallableOptions(feed=feeds, fetch=fetched)
        # `Session.run` and the public `make_callable` look at names and structure anew each time, which takes five
        # times as long as this.
        self._run = session._make_callable_from_options(options)
        #: Of each computed tensor its name and whether its bits are fetched; None where none can be dead.
        self._mortal = None if bits is None else [(fetch, fetch in bits) for fetch in computed]
        self._direct = list(fetches) == computed
        self._sources = [
            (True, computed.index(fetch)) if fetch in computed else (False, feeds.index(fetch)) for fetch in fetches
        ]

    def __call__(self, arrays: Sequence[Array]) -> Sequence[Any]:
        """Arrays, numpy scalars and bytes. Raises the exceptions of tf.errors."""
        results: Sequence[Any] = self._run(*arrays)
        if self._mortal is not None:
            results = [_living(index, result, *self._mortal[index]) for index, result in enumerate(results)]
        if self._direct:
            return results
        return [results[index] if is_computed else arrays[index] for is_computed, index in self._sources]


def _bits(graph: Any, signature: Signature) -> dict[str, str] | None:
    """For a graph with branches: FP32 outputs -> nodes, which are added, that have their bits as INT32. Else None.

    `Session.run` has an error for a dead tensor; a callable gives an empty one of FP32, which no other then is.
    """
    if not _has_branches(graph.get_operations()):
        return None
    bits: dict[str, str] = {}
    for info in signature.outputs.values():
        if info.datatype is DataType.FP32 and info.tensor not in bits:
            tensor = graph.get_tensor_by_name(info.tensor)
            with graph.as_default(), graph.device(tensor.device):
                bits[info.tensor] = tf.bitcast(tensor, tf.int32).name
    return bits


def _living(index: int, result: Any, name: str, is_bits: bool) -> Any:
    """Raises what `Session.run` does where a tensor is dead."""
    if getattr(result, "dtype", None) == np.float32:
        text = f"Retval[{index}] does not have value: '{name}' is in a branch of the graph that was not taken"
        raise tf.errors.InvalidArgumentError(None, None, text)
    return result.view(np.float32) if is_bits else result


def _operation(model: ModelContext, graph: Any, name: str) -> Any:
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        raise InvalidArgument(
            f"unable to load model '{model.name}': TF_INIT_OPS_FILE names '{name}', which is no operation of the graph"
        ) from None


def load_libraries(model: ModelContext) -> None:
    """Custom operators: paths, files of the model, or names that are looked for like any library's."""
    for library in model.config.get("model_operations", {}).get("op_library_filename", ()):
        in_model = model.directory / library
        path = str(in_model) if not Path(library).is_absolute() and in_model.is_file() else library
        try:
            tf.load_op_library(path)
        except (RuntimeError, OSError, tf.errors.OpError) as error:
            raise translated(error) from error


def translated(error: Exception) -> NaiadError:
    """TensorFlow's exception as the error, and with the text, that Triton makes of its status."""
    if isinstance(error, NaiadError):
        return error
    if isinstance(error, tf.errors.OpError):
        return Internal(f"{error_codes_pb2.Code.Name(error.error_code)}: {error.message}")
    return Internal(str(error))


def _datatype(dtype: Any) -> DataType | None:
    return _DATATYPES.get(dtype.base_dtype)


def as_array(value: Any, rank: int) -> Array:
    """A result as an array of `rank` dimensions, where the graph made a number or a string without any."""
    if isinstance(value, bytes):
        array = np.empty(1, np.object_)
        array[0] = value
    else:
        array = np.asarray(value)
    return array.reshape((1,) * rank) if array.ndim == 0 or isinstance(value, bytes) else array
