"""From configured inputs to the arguments of forward(): which input is which argument, and in which form.

A model describes what it takes as a `Forward` (TorchScript, modules) or as a `Tree` (what torch.export recorded: any
nesting of dictionaries, tuples and lists). Each binds the names of a configuration once, when it is loaded, to a
`Binding` that makes a call of each batch. Pure but for torch's types. Runs in hosts.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.utils import _pytree as pytree

from naiad.backends.api import Array, ConfigDict
from naiad.backends.arrays import to_text
from naiad.backends.configured import framework_dims
from naiad.backends.pytorch.structures import Declared, Path, index_of
from naiad.backends.pytorch.tensors import TORCH_TYPES, Device
from naiad.datatypes import BY_CONFIG_NAME, DataType
from naiad.errors import InvalidArgument

Kind = Literal["tensor", "number", "text", "dict"]
Call = tuple[Sequence[Any], Mapping[str, Any]]
#: Turns one array into what an argument takes.
Conversion = Callable[[Array], Any]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of forward(). `depth` is how deep lists of strings are nested, 0 for as deep as they come."""

    name: str
    kind: Kind = "tensor"
    required: bool = True
    keyword_only: bool = False
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Configured:
    """An input as the configuration has it. `rank` includes the batch dimension."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    rank: int
    origin: Literal["input", "control", "state", "batch_input"] = "input"


class Binding(Protocol):
    def call(self, inputs: Mapping[str, Array]) -> Call:
        """The positional and the keyword arguments for one batch."""


def configured_inputs(config: ConfigDict) -> list[Configured]:
    """All that will be fed: inputs, sequence controls, states, and what the server makes of a batch."""
    batching = int(config.get("max_batch_size", 0)) > 0
    sequence = config.get("sequence_batching", {})
    found = []
    for tensor in config.get("input", ()):
        # The elements of requests whose shapes differ come one behind the other.
        dims = (-1,) if tensor.get("allow_ragged_batch") else framework_dims(tensor)
        rank = 1 if tensor.get("allow_ragged_batch") else len(dims) + batching
        found.append(Configured(tensor["name"], BY_CONFIG_NAME[tensor["data_type"]], dims, rank))
    found += [
        Configured(tensor["name"], _control_type(control), (1,), 1 + batching, "control")
        for tensor in sequence.get("control_input", ())
        for control in tensor.get("control", ())
    ]
    for state in sequence.get("state", ()):
        dims = tuple(int(dim) for dim in state.get("dims", ()))
        datatype = BY_CONFIG_NAME[state["data_type"]]
        found.append(Configured(state["input_name"], datatype, dims, len(dims) + batching, "state"))
    for batch_input in config.get("batch_input", ()):
        for name in batch_input.get("target_name", ()):
            datatype = BY_CONFIG_NAME[batch_input["data_type"]]
            found.append(Configured(name, datatype, (-1,), 1, "batch_input"))
    return found


def _control_type(control: Mapping[str, Any]) -> DataType:
    if control.get("kind") == "CONTROL_SEQUENCE_CORRID":
        return BY_CONFIG_NAME[control["data_type"]]
    if control.get("int32_false_true"):
        return DataType.INT32
    return DataType.FP32 if control.get("fp32_false_true") else DataType.BOOL


# --- forward() of TorchScript and modules ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """What forward() takes. `variadic`: any number more (`*args`); `keywords`: any names more (`**kwargs`)."""

    arguments: tuple[Argument, ...]
    variadic: bool = False
    keywords: bool = False

    @property
    def names(self) -> list[str]:
        return [argument.name for argument in self.arguments]

    def describe(self) -> str:
        return "forward() takes " + (", ".join(f"'{name}'" for name in self.names) or "nothing that has a name")

    def bind(
        self, model: str, config: ConfigDict, device: Device, warn: Callable[[str], None] = lambda text: None
    ) -> Binding:
        """Raises InvalidArgument, with Triton's texts, where inputs and arguments do not fit."""
        inputs = configured_inputs(config)
        dictionaries = [argument for argument in self.arguments if argument.kind == "dict"]
        required = sum(argument.required for argument in self.arguments)
        too_many = len(inputs) > len(self.arguments) and not (self.variadic or self.keywords)
        if not dictionaries and (len(inputs) < required or too_many):
            raise InvalidArgument(
                f"unable to load model '{model}', configuration expects {len(inputs)} inputs, model provides"
                f" {len(self.arguments)}: {self.describe()}; give the data_type and dims of each"
            )
        if not any(tensor.origin == "input" for tensor in inputs):
            raise InvalidArgument(
                "model configuration must contain at least one input, none were specified."
                f" {self.describe()}: give their data_type and dims"
            )
        if dictionaries:
            return self._bind_dictionary(inputs, dictionaries, device)
        places = self._places(model, inputs, warn)
        bound = [
            (tensor.name, place, conversion(model, tensor, self._argument(place), device))
            for tensor, place in zip(inputs, places, strict=True)
        ]
        given = {place for _, place, _ in bound}
        if missing := [it.name for at, it in enumerate(self.arguments) if it.required and not {at, it.name} & given]:
            raise InvalidArgument(
                f"unable to load model '{model}': no input is the argument '{missing[0]}' of forward(); "
                f"{self.describe()}, the configuration has {', '.join(repr(it.name) for it in inputs)}"
            )
        return ForwardBinding(bound, self.names)

    def _bind_dictionary(self, inputs: list[Configured], dictionaries: list[Argument], device: Device) -> Binding:
        if len(dictionaries) > 1:
            raise InvalidArgument(
                "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) is supported."
            )
        others = [argument for argument in self.arguments if argument.kind != "dict" and argument.required]
        if others:
            raise unsupported_type(others[0].name)
        return DictionaryBinding(dictionaries[0], inputs, device)

    def _argument(self, place: int | str) -> Argument:
        if isinstance(place, str):
            return next((it for it in self.arguments if it.name == place), Argument(place))
        if place < len(self.arguments) and not self.arguments[place].keyword_only:
            return self.arguments[place]
        return Argument(f"argument {place}")

    def _places(self, model: str, inputs: list[Configured], warn: Callable[[str], None]) -> list[int | str]:
        """The position, or the name of an argument that has no position, of each input."""
        positions: dict[str, int | str] = {
            argument.name: argument.name if argument.keyword_only else at for at, argument in enumerate(self.arguments)
        }
        if all(tensor.name in positions for tensor in inputs):
            return [positions[tensor.name] for tensor in inputs]
        indices = [index_of(tensor.name) for tensor in inputs]
        if all(index is not None for index in indices):
            places = [self._positioned(index) for index in indices if index is not None]
            if len(set(places)) < len(places):
                raise InvalidArgument(
                    f"unable to load model '{model}': two of the inputs {', '.join(it.name for it in inputs)} have the"
                    " same index"
                )
            if self.variadic and set(indices) != set(range(len(indices))):
                raise InvalidArgument(
                    f"unable to load model '{model}': the inputs {', '.join(it.name for it in inputs)} do not count from 0,"
                    " and *args has no gaps"
                )
            if not self.variadic and (beyond := [it for it in indices if it is not None and it >= len(positions)]):
                raise InvalidArgument(
                    f"unable to load model '{model}': an input has the index {beyond[0]}, and {self.describe()}"
                )
            return places
        if self.keywords and not self.variadic and all(tensor.name.isidentifier() for tensor in inputs):
            return [positions.get(tensor.name, tensor.name) for tensor in inputs]
        neither = next(it for it, index in zip(inputs, indices, strict=True) if it.name not in positions)
        for tensor, index in zip(inputs, indices, strict=True):
            if index is not None or tensor.name in positions:
                continue
            if tensor.origin == "state":
                raise InvalidArgument(
                    f"PyTorch model '{model}' is using sequence batching with state but not all inputs and outputs follow"
                    " the <name>__<index> naming convention. "
                )
            if tensor.origin != "input":
                raise InvalidArgument(f"input '{tensor.name}' does not follow <name>__<index> naming convention.")
        warn(
            f"input '{neither.name}' or previous input(s) are neither an input argument to the model '{model}' nor do they"
            " follow the <name>__<index> naming convention. Falling back to enforcing strict ordering from model"
            f" configuration. ({self.describe()}.)"
        )
        return [self._positioned(at) for at in range(len(inputs))]

    def _positioned(self, at: int) -> int | str:
        """The argument `at`, counting those without a position unless there is `*args`."""
        if not self.variadic and at < len(self.arguments) and self.arguments[at].keyword_only:
            return self.arguments[at].name
        return at


class ForwardBinding:
    """Tensors for arguments, by position as far as that goes."""

    def __init__(self, bound: Sequence[tuple[str, int | str, Conversion]], names: Sequence[str]) -> None:
        positional = sorted((place, name, to) for name, place, to in bound if isinstance(place, int))
        self._keywords = [(name, place, to) for name, place, to in bound if isinstance(place, str)]
        # Behind a gap, where an argument keeps its default, only names can say which argument is meant.
        whole = [entry for at, entry in enumerate(positional) if entry[0] == at]
        self._keywords += [(name, names[place], to) for place, name, to in positional[len(whole) :]]
        self._positional = [(name, to) for _, name, to in whole]
        self._names = names

    def call(self, inputs: Mapping[str, Array]) -> Call:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for at, (name, to) in enumerate(self._positional):
            if name in inputs and len(args) == at:
                args.append(to(inputs[name]))
            elif name in inputs:
                kwargs[self._names[at]] = to(inputs[name])
        for name, argument, to in self._keywords:
            if name in inputs:
                kwargs[argument] = to(inputs[name])
        return args, kwargs


class DictionaryBinding:
    """All inputs as the one dictionary that forward() takes."""

    def __init__(self, argument: Argument, inputs: Sequence[Configured], device: Device) -> None:
        self._keyword = argument.name if argument.keyword_only else ""
        self._device = device
        self._names = [tensor.name for tensor in inputs]
        if texts := [tensor.name for tensor in inputs if tensor.datatype is DataType.BYTES]:
            raise InvalidArgument(f"input '{texts[0]}' is TYPE_STRING, and forward() takes a dictionary of tensors")

    def call(self, inputs: Mapping[str, Array]) -> Call:
        tensors = {name: self._device.tensor(inputs[name]) for name in self._names if name in inputs}
        return ((), {self._keyword: tensors}) if self._keyword else ((tensors,), {})


def conversion(model: str, tensor: Configured, argument: Argument, device: Device) -> Conversion:
    """Raises InvalidArgument where the argument cannot take what the configuration says."""
    if argument.kind == "number":
        if tensor.datatype is DataType.BYTES or any(dim != 1 for dim in tensor.dims) or tensor.rank > len(tensor.dims):
            raise InvalidArgument(
                f"unable to load model '{model}': the argument '{argument.name}' of forward() is a single number, input"
                f" '{tensor.name}' has to be a number with dims [1] and no batch"
            )
        return lambda array: array.reshape(()).item()
    if tensor.datatype is not DataType.BYTES:
        if argument.kind == "text":
            raise InvalidArgument(
                f"unable to load model '{model}', configuration expects datatype TYPE_{tensor.datatype.name} for input"
                f" '{tensor.name}', model provides TYPE_BYTES"
            )
        return device.tensor
    depth = argument.depth or tensor.rank
    # A batch of single strings is as much a list as a list is.
    squeezed = depth == 1 and tensor.rank == 2 and tensor.dims == (1,)
    if depth != tensor.rank and not squeezed:
        what = "1 dimensional List of String" if depth == 1 else f"{depth} dimensional Lists of String"
        raise InvalidArgument(f"Triton only supports {what} as input for '{tensor.name}' for model '{model}'")
    name = tensor.name

    def text(array: Array) -> Any:
        return to_text(array.reshape(-1) if squeezed else array, name).tolist()

    return text


def unsupported_type(text: str) -> InvalidArgument:
    return InvalidArgument(
        f"An input of type '{text}' was detected in the model. Only a single input of type Dict(str, Tensor) or input(s)"
        " of type Tensor are supported."
    )


def forward_of_script(module: Any) -> Forward:
    """Raises InvalidArgument for argument types that cannot be fed."""
    schema = module._c._get_method("forward").schema
    return Forward(tuple(_script_argument(argument) for argument in schema.arguments[1:]))


def _script_argument(argument: Any) -> Argument:
    has_default = argument.has_default_value()
    text = str(argument.type)
    if text.startswith("Optional[") and text.endswith("]"):
        text = text[len("Optional[") : -1]
    depth = text.count("List[")
    if text == "Tensor":
        kind: Kind = "tensor"
    elif text == "Dict[str, Tensor]":
        kind = "dict"
    elif text in ("int", "float", "bool", "number"):
        kind = "number"
    elif depth and text == "List[" * depth + "str" + "]" * depth:
        kind = "text"
    elif has_default:
        return Argument(argument.name, "tensor", False, argument.kwarg_only)
    else:
        raise unsupported_type(str(argument.type))
    return Argument(argument.name, kind, not has_default, argument.kwarg_only, depth)


def forward_of_module(module: torch.nn.Module) -> Forward:
    """From the signature and the annotations, which need not be there. Raises InvalidArgument."""
    try:
        hints = typing.get_type_hints(module.forward)
    except Exception:  # an annotation may name what is imported for type checkers only
        hints = {}
    arguments = []
    variadic = keywords = False
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            variadic = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords = True
        else:
            required = parameter.default is parameter.empty
            hint = hints.get(parameter.name)
            kind, depth = _module_kind(hint)
            if kind is None:
                if required:
                    raise unsupported_type(str(getattr(hint, "__name__", hint)))
                kind = "tensor"
            keyword_only = parameter.kind is parameter.KEYWORD_ONLY
            arguments.append(Argument(parameter.name, kind, required, keyword_only, depth))
    return Forward(tuple(arguments), variadic, keywords)


def _module_kind(hint: Any) -> tuple[Kind | None, int]:
    if hint is None or hint is Any:
        return "tensor", 0
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in parts:
        rest = [part for part in parts if part is not type(None)]
        return _module_kind(rest[0]) if len(rest) == 1 else ("tensor", 0)
    if hint in (bool, int, float):
        return "number", 0
    if isinstance(hint, type) and issubclass(hint, torch.Tensor):
        return "tensor", 0
    if hint is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return ("dict", 0) if not parts or parts[0] is str else (None, 0)
    if origin is list:
        depth = 0
        while typing.get_origin(hint) is list:
            hint, depth = typing.get_args(hint)[0], depth + 1
        return ("text", depth) if hint is str else (None, 0)
    # What an annotation of another library means nobody knows; most of those on arguments are tensors.
    return (None if hint in (str, bytes) or origin in (tuple, set, Sequence) else "tensor"), 0


# --- what torch.export recorded ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tree:
    """What an exported program takes: a tree of arguments, and what is known of each of its leaves, in order."""

    spec: Any
    declared: tuple[Declared, ...]
    forward_names: tuple[str, ...] = ()
    names: list[str] = field(default_factory=list, init=False)
    _places: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        paths = _argument_paths(self.spec)
        own = [self._own_names(path) for path in paths]
        counted = [name for names in own for name in set(names)]
        for at, (path, names) in enumerate(zip(paths, own, strict=True)):
            unique = [name for name in names if counted.count(name) == 1]
            self.names.append(unique[0] if unique else _argument_path(path))
            for name in (*unique, _argument_path(path)):
                self._places.setdefault(name, at)

    def _own_names(self, path: Path) -> list[str]:
        """The argument's name for a plain argument, else the innermost key."""
        kind, first, *inner = path
        name = str(first)
        if kind == "ARGS" and isinstance(first, int):
            name = self.forward_names[first] if first < len(self.forward_names) else ""
        if not inner:
            return [name] if name else [f"INPUT__{first}"]
        keys = [str(key) for key in inner if isinstance(key, str)]
        return [*keys[-1:], *([".".join([name, *map(str, inner)])] if name else [])]

    def describe(self) -> str:
        return "the exported program takes " + ", ".join(f"'{name}'" for name in self.names)

    def place(self, name: str) -> int | None:
        at = self._places.get(name)
        return index_of(name) if at is None else at

    def bind(
        self, model: str, config: ConfigDict, device: Device, warn: Callable[[str], None] = lambda text: None
    ) -> Binding:
        """Raises InvalidArgument where inputs are missing, unknown, or of another type or shape."""
        inputs = configured_inputs(config)
        if len(inputs) != len(self.declared):
            raise InvalidArgument(
                f"unable to load model '{model}', configuration expects {len(inputs)} inputs, model provides"
                f" {len(self.declared)}: {self.describe()}"
            )
        order: dict[int, tuple[str, Conversion]] = {}
        batching = int(config.get("max_batch_size", 0)) > 0
        for tensor in inputs:
            at = self.place(tensor.name)
            if at is None or at >= len(self.declared) or at in order:
                raise InvalidArgument(
                    f"unable to load model '{model}': input '{tensor.name}' is no argument of its own; {self.describe()}"
                )
            if tensor.datatype is DataType.BYTES:
                raise InvalidArgument(
                    f"unable to load model '{model}': input '{tensor.name}' is TYPE_STRING, and exported programs take"
                    " tensors only"
                )
            declared = self.declared[at]
            check_declared(model, "input", tensor.name, tensor.datatype, tensor.dims, batching, declared)
            order[at] = (tensor.name, _declared_conversion(declared, device))
        return TreeBinding([order[at] for at in range(len(order))], self.spec)


class TreeBinding:
    def __init__(self, order: Sequence[tuple[str, Conversion]], spec: Any) -> None:
        self._order = order
        self._spec = spec

    def call(self, inputs: Mapping[str, Array]) -> Call:
        try:
            leaves = [to(inputs[name]) for name, to in self._order]
        except KeyError as error:
            raise InvalidArgument(f"input {error} is missing; an exported program needs all of its inputs") from error
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs


def _declared_conversion(declared: Declared, device: Device) -> Conversion:
    if declared.shape == ():
        return lambda array: device.tensor(array.reshape(()) if array.size == 1 else array)
    return device.tensor


def check_declared(
    model: str,
    what: Literal["input", "output"],
    name: str,
    datatype: DataType,
    dims: tuple[int, ...],
    batching: bool,
    declared: Declared,
) -> None:
    """Raises InvalidArgument where the configuration contradicts the program."""
    if declared.datatype is not None and declared.datatype is not datatype:
        raise InvalidArgument(
            f"unable to load model '{model}', configuration expects datatype {datatype.config_name} for {what} '{name}',"
            f" model provides {declared.datatype.config_name}"
        )
    shape = declared.shape
    if shape is None or (shape == () and not batching and all(dim == 1 for dim in dims)):
        return
    full = (-1, *dims) if batching else dims
    if batching and shape[:1] != (-1,) and shape:
        raise InvalidArgument(
            f"unable to load model '{model}': it has max_batch_size > 0, and the first dimension of {what} '{name}' is not"
            f" dynamic in the exported program, whose shape is {list(shape)}"
        )
    # A configuration may be wider than the program, which then refuses what does not fit, but not another one.
    if len(shape) != len(full) or any(-1 not in (a, b) and a != b for a, b in zip(shape, full, strict=True)):
        raise InvalidArgument(
            f"unable to load model '{model}': {what} '{name}' has the shape {list(shape)} in the exported program, the"
            f" configuration says {list(full)}{' with the batch dimension' if batching else ''}"
        )


def _argument_paths(spec: Any) -> list[Path]:
    """("ARGS", 0, "key") of each leaf; the tree is a tuple of arguments and a dictionary of keyword arguments."""
    placeholders = [object() for _ in range(spec.num_leaves)]
    args, kwargs = pytree.tree_unflatten(placeholders, spec)
    found: dict[int, Path] = {}
    for root, value in (("ARGS", args), ("KWARGS", kwargs)):
        for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
            found[id(leaf)] = (root, *(_key(key) for key in keys))
    return [found[id(it)] for it in placeholders]


def _key(key: Any) -> str | int:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            value = getattr(key, attribute)
            return value if isinstance(value, int) else str(value)
    return str(key)


def _argument_path(path: Path) -> str:
    return str(path[0]) + "".join(f"[{key}]" for key in path[1:])


def datatype_of(dtype: torch.dtype) -> DataType | None:
    return next((datatype for datatype, torch_type in TORCH_TYPES.items() if torch_type is dtype), None)
