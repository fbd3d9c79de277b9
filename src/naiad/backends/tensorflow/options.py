"""How a model's session is set up: parameters of the model, settings of the backend, accelerators. Runs in hosts.

Names, defaults and texts are those of Triton's TensorFlow backend (reference R7-5 to R7-11, R7-18, R7-19).
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

from naiad.backends.api import InstanceContext, ModelContext
from naiad.backends.configured import integer
from naiad.backends.cores import available_cores
from naiad.errors import InvalidArgument, Unavailable, Unsupported

#: The platforms, with what they say of the model's file.
PLATFORMS: dict[str, Literal["savedmodel", "graphdef"]] = {
    "tensorflow_savedmodel": "savedmodel",
    "tensorflow_graphdef": "graphdef",
}
_JIT_LEVELS = {
    -1: config_pb2.OptimizerOptions.OFF,
    0: config_pb2.OptimizerOptions.DEFAULT,
    1: config_pb2.OptimizerOptions.ON_1,
}
_TENSORRT_DEFAULTS = {"minimum_segment_size": 3, "max_workspace_size_bytes": 1 << 30, "max_cached_engines": 100}


@dataclass(frozen=True, slots=True)
class Options:
    """What the configuration of a model says to this backend. Empty where Triton's default has a meaning of its own."""

    graph_tag: str
    signature_def: str
    max_session_share_count: int
    init_operations: tuple[str, ...]
    intra_threads: int
    inter_threads: int
    use_per_session_threads: bool
    allow_soft_placement: bool
    gpu_memory_fraction: float
    default_max_batch_size: int


def file_format(model: ModelContext) -> Literal["savedmodel", "graphdef"]:
    """Which format the platform says the model's file has. Raises InvalidArgument."""
    platform = model.config.get("platform", "")
    if platform not in PLATFORMS:
        raise InvalidArgument(f"platform {platform} not supported for TensorFlow model '{model.name}'")
    return PLATFORMS[platform]


def log(model: ModelContext, level: Literal["WARNING", "INFO"], message: str) -> None:
    model.services.log(level, message, "tensorflow.py", sys._getframe(1).f_lineno)


def read_options(model: ModelContext) -> Options:
    """Raises InvalidArgument where a value is not what it should be, Unavailable for a missing file."""
    parameters, settings = model.parameters, model.settings
    share_count = integer(parameters.get("MAX_SESSION_SHARE_COUNT", "1"))
    if share_count <= 0:
        raise InvalidArgument(
            f"parameter 'MAX_SESSION_SHARE_COUNT' must be positive number for TensorFlow model '{model.name}'"
        )
    intra_threads = integer(parameters.get("TF_NUM_INTRA_THREADS", "0"))
    if intra_threads < 0:
        raise InvalidArgument(
            f"parameter 'TF_NUM_INTRA_THREADS' must be non-negative number for TensorFlow model '{model.name}'"
        )
    return Options(
        graph_tag=parameters.get("TF_GRAPH_TAG", ""),
        signature_def=parameters.get("TF_SIGNATURE_DEF", ""),
        max_session_share_count=share_count,
        init_operations=_init_operations(model, parameters.get("TF_INIT_OPS_FILE", "")),
        intra_threads=intra_threads,
        inter_threads=integer(parameters.get("TF_NUM_INTER_THREADS", "0")),
        use_per_session_threads=_boolean(parameters.get("TF_USE_PER_SESSION_THREADS", "false")),
        allow_soft_placement=_boolean(settings.get("allow-soft-placement", "true")),
        gpu_memory_fraction=_number(settings.get("gpu-memory-fraction", "0")),
        default_max_batch_size=max(0, integer(settings.get("default-max-batch-size", "4"))),
    )


def session_config(model: ModelContext, instance: InstanceContext, options: Options) -> Any:
    """The `ConfigProto` of the sessions of an instance. Raises NaiadError for accelerators that cannot be had."""
    config = config_pb2.ConfigProto(
        # TensorFlow would take all cores of the machine, whatever share of them the container has. Its pools are
        # the process's, so the instances of a model do not add up.
        intra_op_parallelism_threads=options.intra_threads or available_cores(),
        inter_op_parallelism_threads=options.inter_threads or available_cores(),
        use_per_session_threads=options.use_per_session_threads,
        allow_soft_placement=options.allow_soft_placement,
    )
    # Each model has a process: were the fraction taken at once, as by Triton's one process, a few would leave nothing.
    config.gpu_options.allow_growth = True
    config.gpu_options.per_process_gpu_memory_fraction = options.gpu_memory_fraction
    if instance.kind == "KIND_CPU":
        config.device_count["GPU"] = 0  # so that the process keeps no memory of a GPU
    optimization = model.config.get("optimization", {})
    level = int(optimization.get("graph", {}).get("level", 0))
    config.graph_options.optimizer_options.global_jit_level = _JIT_LEVELS.get(level, config_pb2.OptimizerOptions.ON_2)
    if level > 0:
        # Without it XLA leaves alone what runs on a CPU. Read once, when the first session of the process opens.
        os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit")
    _set_accelerators(config, model, instance, optimization.get("execution_accelerators", {}))
    return config


def _set_accelerators(
    config: Any, model: ModelContext, instance: InstanceContext, accelerators: dict[str, Any]
) -> None:
    if accelerators.get("cpu_execution_accelerator"):
        raise InvalidArgument("CPU Execution Accelerator is not supported in TensorFlow backend")
    chosen = accelerators.get("gpu_execution_accelerator", ())
    if not chosen:
        return
    if instance.kind == "KIND_CPU":
        log(model, "WARNING", "GPU Execution Accelerator will be ignored for model instance on CPU")
        return
    tensorrt: dict[str, Any] | None = None
    mixed_precision = False
    for accelerator in chosen:
        name = accelerator["name"]
        if name == "tensorrt":
            tensorrt = _tensorrt_options(accelerator.get("parameters", {}))
        elif name == "auto_mixed_precision":
            mixed_precision = True
        elif name != "gpu_io":  # arrays come from and go to the host's memory in any case
            raise InvalidArgument(f"unknown Execution Accelerator '{name}' is requested")
    if mixed_precision and tensorrt is not None:
        raise InvalidArgument("Auto mixed precision can not be set with TFTRT optimization")
    rewrites = config.graph_options.rewrite_options
    if mixed_precision:
        rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
        rewrites.auto_mixed_precision = rewriter_config_pb2.RewriterConfig.ON
    if tensorrt is not None:
        _set_tensorrt(rewrites, tensorrt, max(1, int(model.config.get("max_batch_size", 0))))


def _tensorrt_options(parameters: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"precision_mode": "FP32", **_TENSORRT_DEFAULTS}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in ("FP32", "FP16"):
                raise InvalidArgument(f"unsupported precision mode '{value}' is requested")
            options[key] = value
        elif key in _TENSORRT_DEFAULTS:
            options[key] = integer(value)
        else:
            raise InvalidArgument(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    return options


def _set_tensorrt(rewrites: Any, options: dict[str, Any], max_batch_size: int) -> None:
    if not tf.sysconfig.get_build_info().get("is_tensorrt_build"):
        raise Unsupported(
            "the installed TensorFlow has no TensorRT (the last with it is 2.17): leave the accelerator 'tensorrt' out, or"
            " convert the model to ONNX and use the accelerator of the onnxruntime backend"
        )
    rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    # The layout optimizer leaves constants with a reshape behind, which folding takes away again.
    rewrites.optimizers.extend(["constfold", "layout", "constfold"])
    values = rewrites.custom_optimizers.add(name="TensorRTOptimizer").parameter_map
    values["is_dynamic_op"].b = True
    values["precision_mode"].s = options["precision_mode"].encode()
    values["max_batch_size"].i = max_batch_size
    for key in _TENSORRT_DEFAULTS:
        values[key].i = options[key]
    rewrites.custom_optimizers.add(name="constfold")


def _init_operations(model: ModelContext, filename: str) -> tuple[str, ...]:
    """The operations that TF_INIT_OPS_FILE lists; the file lies in the version's folder or in the model's."""
    if not filename:
        return ()
    folders = (model.version_directory, model.directory)
    path = next((folder / filename for folder in folders if (folder / filename).is_file()), None)
    if path is None:
        raise Unavailable(
            f"unable to load model '{model.name}': TF_INIT_OPS_FILE '{filename}' is neither in {folders[0]} nor in"
            f" {folders[1]}"
        )
    try:
        operations = json.loads(path.read_bytes())["init_ops"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f'unable to load model \'{model.name}\': {path} is not {{"init_ops": ["<operation>", ...]}}: {error!r}'
        ) from error
    if not isinstance(operations, list) or not all(isinstance(operation, str) for operation in operations):
        raise InvalidArgument(
            f"unable to load model '{model.name}': init_ops of {path} is {operations!r}, expected a list of strings"
        )
    return tuple(operations)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"failed to convert '{text}' to double number") from None


def _boolean(text: str) -> bool:
    """ "yes", which Triton's documentation uses and its backend refuses, is true."""
    lowered = text.lower()
    if lowered in ("true", "on", "1", "yes"):
        return True
    if lowered in ("false", "off", "0", "no"):
        return False
    raise InvalidArgument(f"failed to convert '{text}' to boolean value")
