"""Completes a configuration: inputs from forward(), outputs from the file or from a probing run. Runs in hosts.

Exported programs say everything. TorchScript and modules say what their arguments are called, not of which type and
shape they are; where the configuration knows that, a run on zeros shows the outputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from naiad.backends.api import ConfigDict, ModelContext
from naiad.backends.configured import framework_dims
from naiad.backends.placement import first_instance
from naiad.backends.pytorch import loading, settings
from naiad.backends.pytorch.arguments import Forward, Tree, configured_inputs, datatype_of
from naiad.backends.pytorch.loading import Program
from naiad.backends.pytorch.structures import Declared, describe, has_order, is_text, leaf_names, leaves, places
from naiad.backends.pytorch.tensors import Device, number_type
from naiad.datatypes import BY_CONFIG_NAME, DataType
from naiad.errors import InvalidArgument, NaiadError

#: What dynamic extents are tried with: long enough for convolutions, and the usual sides of pictures.
_EXTENTS = (8, 64, 224, 1)


def complete(model: ModelContext) -> ConfigDict | None:
    """The configuration with what could be found out, or None where nothing is missing. Says what could not."""
    config = dict(model.config)
    inputs = [dict(tensor) for tensor in config.get("input", ())]
    outputs = [dict(tensor) for tensor in config.get("output", ())]
    if inputs and outputs and all(map(_is_whole, (*inputs, *outputs))):
        return None
    device = Device(model.name, first_instance(model))
    chosen = settings.read(model.parameters)
    settings.apply(chosen, model)
    program = loading.load(model, device, chosen)
    if isinstance(program.forward, Tree):
        _from_tree(model, config, inputs, outputs, program, program.forward)
    else:
        _name_inputs(model, inputs, program.forward)
        config["input"] = inputs
        if not inputs:
            settings.log(
                model,
                "INFO",
                f"cannot complete the inputs of model '{model.name}': {program.forward.describe()}; what is saved says"
                " nothing of their data_type and dims",
            )
        elif not (outputs and all(map(_is_whole, outputs))) and all(map(_is_whole, inputs)):
            _probe(model, config, outputs, program, device, chosen)
    return config


def _is_whole(tensor: dict[str, Any]) -> bool:
    return bool(tensor.get("name") and tensor.get("dims")) and tensor.get("data_type") in BY_CONFIG_NAME


# --- exported programs ----------------------------------------------------------------------------------------------


def _from_tree(
    model: ModelContext,
    config: ConfigDict,
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    program: Program,
    tree: Tree,
) -> None:
    declared = list(tree.declared)
    found = leaves(program.outputs)
    paths = [path for path, _ in found]
    # An empty list declares nothing.
    results = {at: leaf for at, (_, leaf) in enumerate(found) if isinstance(leaf, Declared)}
    names = leaf_names(paths)
    if any(it.shape is None or it.datatype is None for it in (*declared, *results.values())):
        settings.log(
            model,
            "INFO",
            f"cannot complete the configuration of model '{model.name}': {tree.describe()}; it returns"
            f" {', '.join(map(repr, names))}; a compiled package says"
            " nothing of data_type and dims",
        )
        return
    shapes = [it.shape for it in (*declared, *results.values()) if it.shape is not None]
    batchable = all(shape[:1] == (-1,) for shape in shapes)
    max_batch_size = int(config.get("max_batch_size", 0))
    if batchable and max_batch_size == 0 and not inputs and not outputs:
        text = model.settings.get("default-max-batch-size", "4")
        max_batch_size = int(text) if text.isdigit() else 0
        config["max_batch_size"] = max_batch_size
        settings.log(
            model,
            "INFO",
            f"autofilled max_batch_size to {max_batch_size} for model '{model.name}' since batching is supported but no"
            " max_batch_size is specified in model configuration. Must specify max_batch_size to utilize autofill with a"
            " larger max batch size",
        )
        if max_batch_size > 1 and "sequence_batching" not in config and "dynamic_batching" not in config:
            config["dynamic_batching"] = {}
    elif not batchable and max_batch_size > 0:
        raise InvalidArgument(
            f"autofill failed for model '{model.name}': model does not support batching while non-zero max_batch_size is"
            " specified"
        )
    batching = max_batch_size > 0
    config["input"] = _filled(inputs, tree.names, tree.place, dict(enumerate(declared)), batching)

    def place(name: str) -> int | None:
        return places(model.name, program.outputs, paths, [name], [name])[name]

    config["output"] = _filled(outputs, [names[at] for at in results], place, results, batching)


def _filled(
    tensors: list[dict[str, Any]], names: Sequence[str], place: Any, declared: Mapping[int, Declared], batching: bool
) -> list[dict[str, Any]]:
    """What is given, completed; all there is where nothing is given."""
    tensors = tensors or [{"name": name} for name in names]
    for at, tensor in enumerate(tensors):
        if not tensor.get("name") and at < len(names):
            tensor["name"] = names[at]
        index = place(tensor["name"]) if tensor.get("name") else None
        if index is not None and index in declared:
            _fill(tensor, declared[index], batching)
    return tensors


def _fill(tensor: dict[str, Any], declared: Declared, batching: bool) -> None:
    if tensor.get("data_type") not in BY_CONFIG_NAME and declared.datatype is not None:
        tensor["data_type"] = declared.datatype.config_name
    if not tensor.get("dims") and declared.shape is not None:
        dims = list(declared.shape[1:] if batching else declared.shape)
        tensor["dims"] = dims or [1]
        if not dims and batching:
            tensor["reshape"] = {"shape": []}


# --- TorchScript and modules ----------------------------------------------------------------------------------------


def _name_inputs(model: ModelContext, inputs: list[dict[str, Any]], forward: Forward) -> None:
    """Gives inputs without a name that of the argument in their place."""
    nameless = [at for at, tensor in enumerate(inputs) if not tensor.get("name")]
    for at in nameless:
        if at < len(forward.arguments) and forward.arguments[at].kind != "dict":
            inputs[at]["name"] = forward.names[at]
        else:
            inputs[at]["name"] = f"INPUT__{at}"
    incomplete = [tensor["name"] for tensor in inputs if not _is_whole(tensor)]
    if incomplete:
        settings.log(
            model,
            "INFO",
            f"cannot complete the inputs {', '.join(incomplete)} of model '{model.name}': what is saved says nothing of"
            " their data_type and dims",
        )


def _probe(
    model: ModelContext,
    config: ConfigDict,
    outputs: list[dict[str, Any]],
    program: Program,
    device: Device,
    chosen: settings.Settings,
) -> None:
    """Runs the model on zeros, twice where extents are dynamic, and writes down what came out."""
    binding = program.forward.bind(model.name, config, device)
    batch = min(2, int(config.get("max_batch_size", 0)))
    dynamic = any(-1 in framework_dims(tensor) for tensor in config["input"])

    def result(extent: int, rows: int) -> Any:
        arrays = {}
        for tensor in configured_inputs(config):
            shape = tuple(extent if dim == -1 else dim for dim in tensor.dims)
            shape = (rows, *shape) if tensor.rank > len(tensor.dims) else shape
            if tensor.datatype is DataType.BYTES:
                arrays[tensor.name] = np.full(shape, b"", np.object_)
            else:
                arrays[tensor.name] = np.zeros(shape, tensor.datatype.numpy)
        with device.entered(), settings.running(chosen):
            args, kwargs = binding.call(arrays)
            made = program.call(*args, **kwargs)
            # What goes wrong on a GPU is known only when it is done.
            device.wait()
            return made

    problem: Exception | None = None
    first: Any = None
    for extent in _EXTENTS if dynamic else (1,):
        try:
            first = result(extent, batch)
        except NaiadError:
            raise
        except Exception as error:
            problem = problem or error
            continue
        break
    else:
        settings.log(
            model,
            "INFO",
            f"cannot complete the outputs of model '{model.name}': a run on zeros, to see what it returns, failed:"
            f" {problem}",
        )
        return
    second = first
    if dynamic:
        try:
            second = result(2 * extent, batch)
        except Exception as error:
            settings.log(
                model, "INFO", f"model '{model.name}' takes {extent}, not {2 * extent}, for its dynamic dims: {error}"
            )
    _write_outputs(model, config, outputs, first, second, batch)


def _write_outputs(
    model: ModelContext, config: ConfigDict, outputs: list[dict[str, Any]], first: Any, second: Any, batch: int
) -> None:
    found, again = leaves(first), dict(leaves(second))
    paths = [path for path, _ in found]
    names = leaf_names(paths)
    every = [
        (name, _declared(leaf, again.get(path, leaf)))
        for name, (path, leaf) in zip(names, found, strict=True)
        if _can_be_served(leaf)
    ]
    if not every:
        raise InvalidArgument(
            f"model '{model.name}' returned {describe(first)}, in which there is nothing to be an output"
        )
    outputs = outputs or [{"name": name} for name, _ in every]
    for at, tensor in enumerate(outputs):
        if not tensor.get("name") and at < len(every):
            tensor["name"] = every[at][0]
    given = [tensor["name"] for tensor in outputs if tensor.get("name")]
    chosen = places(model.name, first, paths, given, given)
    for tensor in outputs:
        if tensor.get("name") not in chosen:
            continue
        path, leaf = found[chosen[tensor["name"]]]
        declared = _declared(leaf, again.get(path, leaf))
        if batch and not _is_whole(tensor) and (not declared.shape or _extents(leaf)[0] != batch):
            raise InvalidArgument(
                f"autofill failed for model '{model.name}': with a batch of {batch}, output '{tensor['name']}' has the shape"
                f" {list(_extents(leaf))}, whose first dimension is not the batch; set max_batch_size to 0"
            )
        _fill(tensor, declared, batch > 0)
    config["output"] = outputs
    order = "" if has_order(first) else ", by name"
    settings.log(
        model,
        "INFO",
        f"completed the outputs of model '{model.name}' from a run on zeros{order}: it returned {describe(first)}",
    )


def _can_be_served(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return datatype_of(leaf.dtype) is not None
    # What an empty list could hold it does not say.
    return isinstance(leaf, (str, bool, int, float)) or (is_text(leaf) and bool(leaf))


def _declared(leaf: Any, again: Any) -> Declared:
    """Type and shape of an output; extents that differ between the two runs are dynamic, and those that are 0, which
    depend on the data."""
    one, two = _extents(leaf), _extents(again)
    same = one if len(one) != len(two) else tuple(a if a == b else -1 for a, b in zip(one, two, strict=True))
    shape = tuple(extent or -1 for extent in same)
    if isinstance(leaf, torch.Tensor):
        return Declared(datatype_of(leaf.dtype), shape)
    if isinstance(leaf, (bool, int, float)):
        return Declared(number_type(leaf), ())
    # How many strings there are nobody but the model knows.
    return Declared(DataType.BYTES, (*shape[:-1], -1) if len(shape) else shape)


def _extents(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape)
    return np.shape(np.array(leaf, np.object_)) if isinstance(leaf, list) else ()
