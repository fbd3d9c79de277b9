"""The `parameters` of a PyTorch model: what they are, and what they do to the process and to a run. Runs in hosts.

Some of PyTorch's switches belong to the whole process: with `--isolation=model`, the default, to one model.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from naiad.backends.api import ModelContext
from naiad.backends.cores import cores_per_instance
from naiad.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Settings:
    """None leaves a switch as PyTorch has it; a thread count of 0 is not set."""

    inference_mode: bool = True
    optimized_execution: bool = True
    weight_sharing: bool = False
    cache_cleaning: bool = False
    cudnn: bool = True
    jit_executor: bool | None = None
    jit_profiling: bool | None = None
    tensor_fuser: bool | None = None
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    #: Keyword arguments of torch.compile; None for a module that is not compiled.
    compile_options: Mapping[str, Any] | None = None


def read(parameters: Mapping[str, str]) -> Settings:
    """Raises InvalidArgument where a value is not what its name asks for."""
    return Settings(
        inference_mode=_boolean(parameters, "INFERENCE_MODE", True),
        optimized_execution=not _boolean(parameters, "DISABLE_OPTIMIZED_EXECUTION", False),
        weight_sharing=_boolean(parameters, "ENABLE_WEIGHT_SHARING", False),
        cache_cleaning=_boolean(parameters, "ENABLE_CACHE_CLEANING", False)
        or _boolean(parameters, "CACHE_CLEANING_ENABLED", False),
        cudnn=not _boolean(parameters, "DISABLE_CUDNN", False),
        jit_executor=_boolean(parameters, "ENABLE_JIT_EXECUTOR", None),
        jit_profiling=_boolean(parameters, "ENABLE_JIT_PROFILING", None),
        tensor_fuser=_boolean(parameters, "ENABLE_TENSOR_FUSER", None),
        intra_op_threads=_threads(parameters, "INTRA_OP_THREAD_COUNT", "NUM_THREADS"),
        inter_op_threads=_threads(parameters, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS"),
        compile_options=_compile_options(parameters),
    )


def apply(settings: Settings, model: ModelContext) -> None:
    """Sets what belongs to the process, and the number of threads, from the thread that will run the model."""
    # PyTorch would start a thread for each core of the machine, and so would every other instance of the model.
    torch.set_num_threads(settings.intra_op_threads or cores_per_instance(model.config))
    if settings.inter_op_threads and settings.inter_op_threads != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(settings.inter_op_threads)
        except RuntimeError as error:
            # PyTorch takes it once for a process. The first model keeps it, as in Triton.
            message = (
                f"INTER_OP_THREAD_COUNT of model '{model.name}' stays at {torch.get_num_interop_threads()}: {error}"
            )
            log(model, "WARNING", message)
    if not settings.cudnn:
        torch.backends.cudnn.enabled = False
    if settings.jit_executor is not None:
        torch._C._jit_set_profiling_executor(settings.jit_executor)
    if settings.jit_profiling is not None:
        torch._C._jit_set_profiling_mode(settings.jit_profiling)
    if settings.tensor_fuser is not None:
        torch._C._jit_set_texpr_fuser_enabled(settings.tensor_fuser)


def running(settings: Settings) -> AbstractContextManager[Any]:
    """The modes a batch runs in; PyTorch keeps them per thread."""
    mode: AbstractContextManager[Any] = torch.inference_mode() if settings.inference_mode else torch.no_grad()
    return mode if settings.optimized_execution else _unoptimized(mode)


@contextmanager
def _unoptimized(mode: AbstractContextManager[Any]) -> Iterator[None]:
    optimized = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        with mode:
            yield
    finally:
        torch._C._set_graph_executor_optimize(optimized)


def log(model: ModelContext, level: Literal["WARNING", "INFO"], message: str) -> None:
    """A line in the server's log, as of the caller."""
    caller = sys._getframe(1)
    model.services.log(level, message, Path(caller.f_code.co_filename).name, caller.f_lineno)


def _boolean(parameters: Mapping[str, str], key: str, default: Any) -> Any:
    value = parameters.get(key)
    if value is None:
        return default
    lowered = value.strip().lower()
    if lowered in ("true", "on", "1"):
        return True
    if lowered in ("false", "off", "0"):
        return False
    raise InvalidArgument(f"parameter {key}: failed to convert '{value}' to boolean value")


def _threads(parameters: Mapping[str, str], *keys: str) -> int:
    for key in keys:
        value = parameters.get(key)
        if value is None:
            continue
        try:
            count = int(value)
        except ValueError:
            raise InvalidArgument(f"parameter {key}: failed to convert '{value}' to integer number") from None
        return max(0, count)
    return 0


def _compile_options(parameters: Mapping[str, str]) -> Mapping[str, Any] | None:
    key = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
    value = parameters.get(key)
    if value is None:
        return None
    try:
        options = json.loads(value)
    except ValueError as error:
        raise InvalidArgument(f"parameter {key}: {value!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise InvalidArgument(f"parameter {key}: {value!r} is not a JSON object of keyword arguments")
    if "model" in options:
        raise InvalidArgument("'model' is not an optional parameter for 'torch.compile'")
    return options
