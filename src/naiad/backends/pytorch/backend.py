"""One instance of a PyTorch model: loads it, binds names to arguments and results, runs it. Runs in hosts.

Error texts about a configuration are those of Triton's PyTorch backend.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from naiad.backends.api import Array, ArrayBackend, ConfigDict, InstanceContext, ModelContext
from naiad.backends.pytorch import completion, loading, settings
from naiad.backends.pytorch.arguments import Tree, check_declared
from naiad.backends.pytorch.loading import Program
from naiad.backends.pytorch.results import Results
from naiad.backends.pytorch.tensors import Device
from naiad.errors import Internal, NaiadError


class PyTorchBackend(ArrayBackend):
    modules: ClassVar[tuple[str, ...]] = ("torch", "torch.export")
    extra: ClassVar[str] = "torch"

    @classmethod
    def uses_gpus(cls) -> bool:
        return torch.version.cuda is not None

    @classmethod
    def autocomplete(cls, model: ModelContext) -> ConfigDict | None:
        return completion.complete(model)

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        self._settings = settings.read(model.parameters)
        settings.apply(self._settings, model)
        self._device = Device(model.name, instance)
        self._program = _program(model, self._device, self._settings)

        def warn(text: str) -> None:
            settings.log(model, "WARNING", text)

        self._binding = self._program.forward.bind(model.name, model.config, self._device, warn)
        self._results = Results(model.name, model.config, self._device)
        # Code of users may keep what it is given; of an exported program no Python is left.
        self.keeps_inputs = not isinstance(self._program.forward, Tree) and not self._device.is_cuda
        if isinstance(self._program.forward, Tree):
            _check_outputs(model, self._program, self._results)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        with self._device.entered(), settings.running(self._settings):
            args, kwargs = self._binding.call(inputs)
            try:
                result = self._program.call(*args, **kwargs)
                arrays = self._results.arrays(result, outputs)
            except NaiadError:
                raise
            except Exception as error:
                raise Internal(f"PyTorch execute failure: {_text(error)}") from error
        if self._settings.cache_cleaning:
            # Not while tensors of this batch are alive: they would keep their memory.
            del args, kwargs, result
            self._device.clean_cache()
        return arrays

    def close(self) -> None:
        del self._program


def _program(model: ModelContext, device: Device, chosen: settings.Settings) -> Program:
    if not chosen.weight_sharing:
        return loading.load(model, device, chosen)
    return model.shared(f"program on {device.device}", lambda: loading.load(model, device, chosen))


def _check_outputs(model: ModelContext, program: Program, results: Results) -> None:
    """Of an exported program, whose outputs are known before it runs."""
    found, places = results.find(program.outputs, list(results.outputs))
    batching = int(model.config.get("max_batch_size", 0)) > 0
    for output in results.outputs.values():
        declared = found[places[output.name]][1]
        check_declared(model.name, "output", output.name, output.datatype, output.dims, batching, declared)


def _text(error: Exception) -> str:
    # The class says as much as the message where that is a bare key, name or nothing at all.
    text = str(error)
    return text if isinstance(error, RuntimeError) and text else f"{type(error).__name__}: {text}"
