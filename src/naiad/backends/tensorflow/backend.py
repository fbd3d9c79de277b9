"""The backend's class: one session per instance, or per several of them. Runs in hosts, on the instance's thread."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

# Lines on the processor's instruction sets, at every start of a host.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import tensorflow as tf

from naiad.backends.api import Array, ArrayBackend, ConfigDict, InstanceContext, ModelContext
from naiad.backends.configured import framework_dims
from naiad.backends.tensorflow.graphs import (
    GraphSession,
    as_array,
    graph_signature,
    import_graph_def,
    load_libraries,
    read_graph_def,
    read_saved_model,
    served_signature,
    translated,
)
from naiad.backends.tensorflow.options import file_format, log, read_options
from naiad.backends.tensorflow.signature import check, complete
from naiad.errors import Internal, Unavailable

# It says of every function used here that TensorFlow 1 has come to its end.
tf.get_logger().setLevel("ERROR")


class TensorflowBackend(ArrayBackend):
    modules: ClassVar[tuple[str, ...]] = ("tensorflow",)
    extra: ClassVar[str] = "tensorflow"

    @classmethod
    def uses_gpus(cls) -> bool:
        return bool(tf.test.is_built_with_cuda())

    @classmethod
    def autocomplete(cls, model: ModelContext) -> ConfigDict | None:
        is_saved_model = file_format(model) == "savedmodel"
        options = read_options(model)
        load_libraries(model)
        if not model.path.exists():
            return None  # loading says so, with the instance's name
        try:
            if is_saved_model:
                signature, _ = served_signature(model, read_saved_model(model), options)
            else:
                signature = graph_signature(model, import_graph_def(read_graph_def(model), None, clear_devices=True))
        except Exception as error:
            raise Internal(
                f"unable to auto-complete model configuration for '{model.name}', failed to load model:"
                f" {translated(error).message}"
            ) from error
        return complete(
            model.name,
            model.config,
            signature,
            options.default_max_batch_size,
            functools.partial(log, model),
        )

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        is_saved_model = file_format(model) == "savedmodel"
        options = read_options(model)
        if not model.path.exists():
            raise Unavailable(f"unable to find '{model.path}' for model instance '{instance.name}'")
        model.shared("libraries", lambda: load_libraries(model))
        self._session = _shared_session(
            model,
            instance,
            options.max_session_share_count,
            lambda: GraphSession(model, instance, options, is_saved_model),
        )
        signature = self._session.signature
        check(model.name, model.config, signature)

        inputs = [tensor["name"] for tensor in model.config.get("input", ())]
        outputs = {tensor["name"]: tensor for tensor in model.config.get("output", ())}
        #: Inputs without dimensions, which are configured as [1].
        self._scalars = [name for name in inputs if signature.inputs[name].shape == ()]
        batching = int(model.config.get("max_batch_size", 0)) > 0
        #: Outputs that may come without dimensions, and how many they are to have.
        self._ranks = {
            name: len(framework_dims(tensor)) + batching
            for name, tensor in outputs.items()
            if not signature.outputs[name].shape
        }
        # What most requests ask for is compiled before the first of them comes.
        self._session.call(tuple(inputs), tuple(outputs))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        call = self._session.call(tuple(inputs), tuple(outputs))
        arrays = list(inputs.values())
        if self._scalars:
            arrays = [
                array.reshape(()) if name in self._scalars and array.size == 1 else array
                for name, array in inputs.items()
            ]
        try:
            results: dict[str, Any] = dict(zip(outputs, call(arrays), strict=True))
        except tf.errors.OpError as error:
            raise translated(error) from error
        for name, rank in self._ranks.items():
            if name in results:
                results[name] = as_array(results[name], rank)
        return results

    def close(self) -> None:
        del self._session


def _shared_session(model: ModelContext, instance: InstanceContext, share_count: int, make: Any) -> GraphSession:
    """The session of an instance: the last one of its device, until `share_count` instances have it."""
    sessions: dict[tuple[str, int], tuple[int, GraphSession]] = model.shared("sessions", dict)
    device = (instance.kind, instance.device_id)
    users, session = sessions.get(device, (0, None))
    if session is None or users == share_count:
        users, session = 0, make()
    if users + 1 < share_count:
        sessions[device] = (users + 1, session)
    else:
        # Nobody else will get it: it shall go when its instances do.
        sessions.pop(device, None)
    return session
