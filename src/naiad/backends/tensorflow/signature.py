"""What a TensorFlow model takes and gives, and what that says about its configuration. Pure: no TensorFlow here.

Rules and texts are those of Triton's TensorFlow backend (reference R7-12 to R7-16). A SavedModel's signature is
complete and binding. A GraphDef has none: any placeholder may be an input and any node an output, and extents that the
graph leaves open may be fixed by the configuration; Triton takes its configurations on trust, here they are held
against what the graph knows, and completed from it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from naiad.backends.api import ConfigDict
from naiad.backends.configured import control_inputs, framework_dims, shape_text, wrong_dims
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument, NaiadError

#: What Triton's backend takes: all of the protocol but BF16.
DATATYPES = {datatype.config_name: datatype for datatype in DataType if datatype is not DataType.BF16}

Log = Callable[[Literal["WARNING", "INFO"], str], None]
Tensor = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the graph. `shape` has -1 for open extents and is None where not even the rank is known."""

    tensor: str
    datatype: DataType
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors of a model by the names that a configuration has for them.

    `binding` tells a SavedModel from a GraphDef, whose `inputs` and `outputs` are those it could have. Those that are
    not in `natural` are left to who asks for them by name.
    """

    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    binding: bool = True
    natural: frozenset[str] = frozenset()
    #: For error texts, where `outputs` has not all.
    output_names: tuple[str, ...] = ()
    #: False where a branch is chosen, which all rows of a batch would take.
    batchable: bool = True

    def natural_inputs(self) -> dict[str, TensorInfo]:
        return {name: info for name, info in self.inputs.items() if self.binding or name in self.natural}

    def natural_outputs(self) -> dict[str, TensorInfo]:
        return {name: info for name, info in self.outputs.items() if self.binding or name in self.natural}


# --- completion ---------------------------------------------------------------------------------------------------


def complete(
    model: str, config: ConfigDict, signature: Signature, default_max_batch_size: int, log: Log
) -> ConfigDict | None:
    """`config` with what the signature says filled in; None where there is nothing to do.

    Raises InvalidArgument or Internal, with Triton's texts, where configuration and signature do not fit.
    """
    if not signature.binding and _is_complete(config):
        return None
    config = dict(config)
    batchable = signature.batchable and all(
        info.shape is None or info.shape[:1] == (-1,)
        for info in (*signature.natural_inputs().values(), *signature.natural_outputs().values())
    )
    max_batch_size = int(config.get("max_batch_size", 0))
    if max_batch_size > 0 and not batchable and signature.binding:
        raise Internal(
            f"unable to autofill for '{model}', configuration specified max-batch {max_batch_size} but model signature"
            " does not support batching"
        )
    speaks_for_batching = batchable and _speaks_for_batching(model, config, signature)
    batching = max_batch_size > 0 or (speaks_for_batching and default_max_batch_size > 0)
    if max_batch_size == 0 and batching:
        config["max_batch_size"] = max_batch_size = default_max_batch_size
        log(
            "WARNING",
            f"autofilled max_batch_size to {max_batch_size} for model '{model}' since batching is supported but no"
            " max_batch_size is specified in model configuration. Must specify max_batch_size to utilize autofill with a"
            " larger max batch size",
        )
    if max_batch_size > 1 and "sequence_batching" not in config and "dynamic_batching" not in config:
        config["dynamic_batching"] = {}
    config["input"] = _completed_inputs(model, config, signature, batching, log)
    config["output"] = _completed_outputs(model, config, signature, batching, log)
    return config


def _is_complete(config: ConfigDict) -> bool:
    tensors = [*config.get("input", ()), *config.get("output", ())]
    sides = bool(config.get("input")) and bool(config.get("output"))
    return sides and all(tensor.get("dims") and tensor.get("data_type") in DATATYPES for tensor in tensors)


def _speaks_for_batching(model: str, config: ConfigDict, signature: Signature) -> bool:
    """Whether the inputs and outputs that the configuration has leave out the batch dimension, as far as they tell.

    A model whose first extents are all open may still mean something else by them; a `max_batch_size` of 0 does not say
    whether it was written or left out.
    """
    given = [(tensor, signature.inputs) for tensor in config.get("input", ())]
    given += [(tensor, signature.outputs) for tensor in config.get("output", ())]
    if not given:
        return True
    without_dims = False
    decided: bool | None = None
    for tensor, infos in given:
        if tensor.get("allow_ragged_batch"):
            return True
        info = infos.get(tensor.get("name", ""))
        if info is None or not info.shape:
            continue
        dims = framework_dims(tensor)
        if not dims:
            without_dims = True
            continue
        says = len(dims) == len(info.shape) - 1
        if decided is not None and says is not decided:
            raise Internal(
                f"unable to autofill for '{model}', model tensor configurations are contradicting each other in terms of"
                " whether batching is supported"
            )
        decided = says
    return without_dims if decided is None else decided


def _completed_inputs(model: str, config: ConfigDict, signature: Signature, batching: bool, log: Log) -> list[Tensor]:
    tensors = [
        _filled(model, tensor, signature.inputs.get(tensor.get("name", "")), signature, batching)
        for tensor in config.get("input", ())
    ]
    taken = {tensor.get("name") for tensor in tensors}
    taken.update(name for batch_input in config.get("batch_input", ()) for name in batch_input.get("target_name", ()))
    taken.update(name for name, _ in control_inputs(config))
    taken.update(state["input_name"] for state in sequence_states(config))
    for name, info in signature.inputs.items():
        if name in taken:
            continue
        if not signature.binding and name not in signature.natural:
            log("INFO", f"input '{name}' of model '{model}' has a value in the graph and is not completed")
        else:
            tensors.append(_filled(model, {"name": name}, info, signature, batching))
    return tensors


def _completed_outputs(model: str, config: ConfigDict, signature: Signature, batching: bool, log: Log) -> list[Tensor]:
    if given := config.get("output"):
        return [
            _filled(model, tensor, signature.outputs.get(tensor.get("name", "")), signature, batching)
            for tensor in given
        ]
    tensors = []
    states = {state["output_name"] for state in sequence_states(config)}
    for name, info in signature.natural_outputs().items():
        if name in states:
            continue
        if info.shape is None and not signature.binding:
            log(
                "WARNING",
                f"output '{name}' of model '{model}' is left out of its configuration, since the graph does not know its"
                " rank; an output with dims in config.pbtxt is served",
            )
        elif not info.shape and signature.binding:
            raise InvalidArgument(
                f"Unable to autofill for '{model}': the rank of model tensor '{name}' is 0 which is not supported"
            )
        else:
            tensors.append(_filled(model, {"name": name}, info, signature, batching))
    return tensors


def _filled(model: str, tensor: Tensor, info: TensorInfo | None, signature: Signature, batching: bool) -> Tensor:
    """`tensor` with data type and dims; as it is if the model does not have it, which the check says later."""
    if info is None:
        return tensor
    filled = dict(tensor)
    if filled.get("data_type", "TYPE_INVALID") == "TYPE_INVALID":
        filled["data_type"] = info.datatype.config_name
    if not filled.get("dims"):
        if info.shape is None or (not info.shape and signature.binding):
            raise InvalidArgument(
                f"Unable to autofill for '{model}': the rank of model tensor '{tensor['name']}' is 0 and dimensions are"
                " not defined"
            )
        dims = list(info.shape[1:] if batching else info.shape)
        filled["dims"] = dims or [1]
        if not dims and info.shape:
            filled["reshape"] = {"shape": []}
    return filled


# --- checks -------------------------------------------------------------------------------------------------------


def check(model: str, config: ConfigDict, signature: Signature) -> None:
    """Raises InvalidArgument or Internal, with Triton's texts, where configuration and signature do not fit."""
    inputs, outputs = config.get("input", ()), config.get("output", ())
    for tensor in (*inputs, *outputs):
        if tensor.get("data_type") not in DATATYPES:
            raise InvalidArgument(
                f"unsupported datatype '{tensor.get('data_type')}' for tensor '{tensor['name']}' for model '{model}'"
            )
    batching = int(config.get("max_batch_size", 0)) > 0
    if not signature.binding and len(signature.inputs) < len(inputs):
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects {len(inputs)} inputs, model provides at most"
            f" {len(signature.inputs)}"
        )
    controls = control_inputs(config)
    for name, data_type in controls:
        _check_control(model, name, data_type, signature, batching)
    _check_names("input", inputs, signature.inputs)
    states = sequence_states(config)
    expected = len(inputs) + len(config.get("batch_input", ())) + len(controls) + len(states)
    if signature.binding and len(signature.inputs) != expected:
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects {expected} inputs, model provides"
            f" {len(signature.inputs)}"
        )
    for tensor in inputs:
        info = signature.inputs[tensor["name"]]
        if not tensor.get("allow_ragged_batch"):
            _check_dims(model, tensor, info, batching, exact=False, binding=signature.binding)
        elif info.shape is not None and info.shape != (-1,):
            raise InvalidArgument(
                f"unable to load model '{model}', configuration expects model provides input with shape [-1]  for ragged"
                f" input '{tensor['name']}', model provides {shape_text(info.shape)}"
            )
        _check_datatype(model, "input", tensor, info)
    _check_names("output", outputs, signature.outputs, signature.output_names)
    of_batch = {name for output in config.get("batch_output", ()) for name in output.get("target_name", ())}
    for tensor in outputs:
        info = signature.outputs[tensor["name"]]
        if tensor["name"] not in of_batch:
            _check_dims(model, tensor, info, batching, exact=True, binding=signature.binding)
        _check_datatype(model, "output", tensor, info)
    for side, infos in (("input", signature.inputs), ("output", signature.outputs)):
        tensors = [{**state, "name": state[f"{side}_name"]} for state in states]
        _check_names(side, tensors, infos)
        for tensor in tensors:
            _check_dims(model, tensor, infos[tensor["name"]], batching, exact=False, binding=signature.binding)
            _check_datatype(model, side, tensor, infos[tensor["name"]])


def _check_names(
    what: str, tensors: Sequence[Tensor], infos: Mapping[str, TensorInfo], names: Iterable[str] = ()
) -> None:
    for tensor in tensors:
        if tensor["name"] not in infos:
            allowed = ", ".join(sorted({*infos, *names}))
            raise InvalidArgument(f"unexpected inference {what} '{tensor['name']}', allowed {what}s are: {allowed}")


def _check_datatype(model: str, what: str, tensor: Tensor, info: TensorInfo) -> None:
    if tensor["data_type"] != info.datatype.config_name:
        # The one place where Triton writes TYPE_ before its protocol's name: a string tensor is TYPE_BYTES here.
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects datatype {tensor['data_type']} for {what}"
            f" '{tensor['name']}', model provides TYPE_{info.datatype.name}"
        )


def _check_dims(model: str, tensor: Tensor, info: TensorInfo, batching: bool, *, exact: bool, binding: bool) -> None:
    problem = dims_problem(model, tensor["name"], info.shape, framework_dims(tensor), batching, exact, binding)
    if problem is not None:
        raise problem


def dims_problem(
    model: str,
    name: str,
    shape: tuple[int, ...] | None,
    dims: tuple[int, ...],
    batching: bool,
    exact: bool,
    binding: bool,
) -> NaiadError | None:
    """Why `dims` do not fit `shape`. `exact`: the configuration may not fix an extent that the model leaves open."""
    if shape is None:
        return None
    if not shape and not batching and all(dim == 1 for dim in dims):
        return None  # a number without dimensions is configured as [1]
    if batching and binding and shape[:1] != (-1,):
        return InvalidArgument(
            f"model '{model}', tensor '{name}': for the model to support batching the shape should have at least 1"
            f" dimension and the first dimension must be -1; but shape expected by the model is {shape_text(shape)}"
        )
    full = (-1, *dims) if batching else dims
    if len(shape) == len(full):
        pairs = zip(full, shape, strict=True)
        if not binding:
            fits = all(got == wanted or -1 in (got, wanted) for got, wanted in pairs)
        else:
            fits = all(got == wanted or (wanted == -1 and not exact) for got, wanted in pairs)
        if fits:
            return None
    return wrong_dims(model, name, shape, full, batching)


def _check_control(model: str, name: str, data_type: str, signature: Signature, batching: bool) -> None:
    info = signature.inputs.get(name)
    if info is None:
        raise Internal(f"configuration specified sequence control '{name}', but model does not provide that input")
    if not signature.binding:
        return
    problem = dims_problem(model, name, info.shape, (1,), batching, exact=True, binding=True)
    if problem is not None:
        raise InvalidArgument(f"unable to load model '{model}', sequence control '{name}': {problem.message}")
    if data_type != info.datatype.config_name:
        raise InvalidArgument(
            f"unable to load model '{model}', sequence control '{name}': the model expects TYPE_{info.datatype.name} but"
            f" the model configuration specifies data-type {data_type}"
        )


def sequence_states(config: ConfigDict) -> list[Tensor]:
    """The implicit state of `sequence_batching`, which Triton has for other backends only."""
    return list(config.get("sequence_batching", {}).get("state", ()))
