"""Implicit state: tensors that a model answers at one step of a sequence and gets at the next.

The server keeps them, one set of buffers per sequence: it adds the state inputs to each request and takes the state
outputs from each answer. Hosts know nothing of sequences; every backend that takes tensors by name can have state, and
a state may change its size, so `use_same_buffer_for_input_output` and `use_growable_memory`, which save GPU copies in
Triton, change nothing here. The price is one copy in and one out per step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from naiad.config.model_config import ModelConfig, SequenceState
from naiad.datatypes import DataType
from naiad.errors import Internal, InvalidArgument
from naiad.messages import InferRequest, InferResponse, Tensor
from naiad.scheduling.controls import elements, zeros_like


class States:
    """The implicit state of a model. `contents` holds the bytes of initial states that come from files, by input."""

    def __init__(self, config: ModelConfig, contents: Mapping[str, bytes]) -> None:
        states = () if config.sequence_batching is None else config.sequence_batching.states
        self.initial: tuple[Tensor, ...] = tuple(
            [_initial(state, contents.get(state.input_name), config.batching) for state in states]
        )
        #: Name of the output -> (place, name of the input).
        self._places = {state.output_name: (place, state.input_name) for place, state in enumerate(states)}
        self._all_outputs = tuple(dict.fromkeys((*config.outputs, *self._places)))
        self._visible = frozenset(config.outputs)

    def __bool__(self) -> bool:
        return bool(self.initial)

    def outputs(self, requested: tuple[str, ...]) -> tuple[str, ...]:
        """What to ask the model for when the client asked for `requested`, () being everything configured."""
        if not requested:
            return self._all_outputs
        return tuple(dict.fromkeys((*requested, *self._places)))

    def split(
        self, response: InferResponse, request: InferRequest, current: tuple[Tensor, ...]
    ) -> tuple[InferResponse, tuple[Tensor, ...]]:
        """(what the client of `request` gets, the state for the next step).

        A state the model has not answered stays as it was in `current`. Its buffers are owned.
        """
        updated = list(current)
        visible: list[Tensor] = []
        wanted = request.outputs or self._visible
        for tensor in response.outputs:
            place = self._places.get(tensor.name)
            if place is not None:
                updated[place[0]] = Tensor(place[1], tensor.datatype, tensor.shape, bytes(tensor.data))
            if tensor.name in wanted:
                visible.append(tensor)
        answer = InferResponse(
            response.model_name, response.model_version, response.id, tuple(visible), response.parameters
        )
        return answer, tuple(updated)

    def shapes(self, state: tuple[Tensor, ...]) -> object:
        """What tells whether two states fit one batch; None for the initial shapes."""
        shapes = tuple([tensor.shape for tensor in state])
        return None if shapes == tuple([tensor.shape for tensor in self.initial]) else shapes


def nulls(state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The state of a row without a request, in a batch with a row that has `state`."""
    return tuple([zeros_like(tensor) for tensor in state])


def read_initial_states(directory: Path, config: ModelConfig) -> dict[str, bytes]:
    """The files of the folder `initial_state` that the configuration names, by state input. Raises InvalidArgument or
    Internal. Reads from disk: for a thread."""
    contents: dict[str, bytes] = {}
    for state in () if config.sequence_batching is None else config.sequence_batching.states:
        for initial in state.initial_state:
            if not initial.data_file:
                continue
            path = directory / "initial_state" / initial.data_file
            try:
                data = path.read_bytes()
            except OSError as error:
                raise Internal(f"failed to open text file for read {path}: {error.strerror}") from None
            size = elements(initial.dims) * state.datatype.byte_size
            if len(data) < size:
                raise InvalidArgument(
                    f"initial_state setting expects {size} bytes, but the data provided from {initial.data_file}only "
                    f"has {len(data)} bytes."
                )
            contents[state.input_name] = data[:size] if size else data
    return contents


def _initial(state: SequenceState, contents: bytes | None, batching: bool) -> Tensor:
    dims = (
        state.initial_state[0].dims if state.initial_state else tuple([max(extent, -extent) for extent in state.dims])
    )
    shape = (1, *dims) if batching else dims
    size = elements(shape) * (4 if state.datatype is DataType.BYTES else state.datatype.byte_size)
    return Tensor(state.input_name, state.datatype, shape, bytes(size) if contents is None else contents)
