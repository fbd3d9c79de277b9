"""What a configuration says, as several backends read it, and Triton's words for what does not fit. Runs in hosts."""

from collections.abc import Mapping, Sequence
from typing import Any

from naiad.errors import InvalidArgument


def framework_dims(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """The dims of a configured input or output as the framework sees them: its `reshape`, else its `dims`."""
    reshape = tensor.get("reshape")
    dims = tensor.get("dims", ()) if reshape is None else reshape.get("shape", ())
    return tuple(int(dim) for dim in dims)


def control_inputs(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and configured data type of each control input of `sequence_batching`."""
    controls = []
    for tensor in config.get("sequence_batching", {}).get("control_input", ()):
        for control in tensor.get("control", ()):
            if control.get("kind") == "CONTROL_SEQUENCE_CORRID":
                data_type = control.get("data_type", "TYPE_INVALID")
            elif control.get("int32_false_true"):
                data_type = "TYPE_INT32"
            elif control.get("fp32_false_true"):
                data_type = "TYPE_FP32"
            else:
                data_type = "TYPE_BOOL"
            controls.append((tensor["name"], data_type))
    return controls


def wrong_dims(
    model: str, tensor: str, shape: Sequence[int], configured: Sequence[int], batching: bool
) -> InvalidArgument:
    """The error where the model has `shape`; `configured` is with the batch dimension."""
    why = (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete shape"
        if batching
        else "shape"
    )
    return InvalidArgument(
        f"model '{model}', tensor '{tensor}': the model expects {len(shape)} dimensions (shape {shape_text(shape)}) but the"
        f" model configuration specifies {len(configured)} dimensions ({why} {shape_text(configured)})"
    )


def shape_text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def integer(text: str) -> int:
    """The value of a parameter. Raises InvalidArgument."""
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"failed to convert '{text}' to integer number") from None
