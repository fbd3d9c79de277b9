"""What every backend owes, tested on the backend's class itself. `makers/` says how a backend joins."""

import importlib.util
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import Loaded, backend_class, context
from makers import Maker, makers

from naiad.backends.api import Array, ConfigDict, ModelContext
from naiad.datatypes import DataType

A = np.array([1, 2, 3, 4], np.float32)
B = np.array([4, 3, 2, 0.5], np.float32)


def missing(maker: Maker) -> str:
    absent = [name for name in maker.requires if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed" if absent else ""


def available() -> list[Any]:
    return [
        pytest.param(maker, id=repr(maker), marks=pytest.mark.skipif(bool(missing(maker)), reason=missing(maker)))
        for maker in makers()
    ]


def each_datatype() -> list[Any]:
    return [
        pytest.param(
            maker,
            datatype,
            id=f"{maker}-{datatype.name}",
            marks=pytest.mark.skipif(bool(missing(maker)), reason=missing(maker)),
        )
        for maker in makers()
        for datatype in DataType
        if datatype in maker.datatypes
    ]


every_backend = pytest.mark.parametrize("maker", available())


def tensor(name: str, datatype: DataType, dims: list[int]) -> dict[str, Any]:
    return {"name": name, "data_type": datatype.config_name, "dims": dims}


def configuration(
    maker: Maker,
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    max_batch_size: int = 0,
) -> ConfigDict:
    return {
        "backend": maker.backend,
        "max_batch_size": max_batch_size,
        "input": inputs,
        "output": outputs,
        "instance_group": [{"name": "g", "kind": "KIND_CPU", "count": 1}],
        **maker.config,
    }


def model(
    maker: Maker,
    directory: Path,
    write: Callable[[Path], None],
    config: ConfigDict,
    settings: dict[str, str] | None = None,
) -> ModelContext:
    made = context(directory, config, maker.filename, settings)
    write(made.path)
    return made


def add_sub(maker: Maker, directory: Path, batching: bool) -> ModelContext:
    config = configuration(
        maker,
        [tensor(name, DataType.FP32, [4]) for name in maker.inputs],
        [tensor(name, DataType.FP32, [4]) for name in maker.outputs],
        max_batch_size=8 if batching else 0,
    )
    return model(maker, directory / "add_sub", lambda path: maker.add_sub(path, batching), config)


def identity(maker: Maker, directory: Path, datatype: DataType, dims: tuple[int, ...]) -> ModelContext:
    config = configuration(
        maker,
        [tensor(maker.inputs[0], datatype, list(dims))],
        [tensor(maker.outputs[0], datatype, list(dims))],
        max_batch_size=8,
    )
    return model(maker, directory / "identity", lambda path: maker.identity(path, datatype, dims), config)


def some_elements(datatype: DataType, count: int) -> Array:
    if datatype is DataType.BYTES:
        elements = [b"", b"one", "zw\u00f6lf".encode(), b"with\x00zero", b"x" * 300]
        array = np.empty(count, np.object_)
        array[:] = [elements[i % len(elements)] for i in range(count)]
        return array
    if datatype is DataType.BOOL:
        return np.arange(count) % 2 == 0
    if datatype.numpy.kind in "iu":
        bounds = np.iinfo(datatype.numpy)
        return np.array([bounds.min, bounds.max, 1, 0, 77, *range(count)][:count], datatype.numpy)
    return np.array([0.5, -2, 0, np.inf, 1.5, *range(count)][:count]).astype(datatype.numpy)


# --- running ------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("rows", [None, 1, 5], ids=["no batch", "batch of 1", "batch of 5"])
def test_arrays_in_arrays_out(maker: Maker, rows: int | None, tmp_path: Path) -> None:
    a, b = (A, B) if rows is None else (np.arange(rows * 4, dtype=np.float32).reshape(rows, 4), np.tile(B, (rows, 1)))
    with Loaded(add_sub(maker, tmp_path, batching=rows is not None)) as loaded:
        results = loaded.run(dict(zip(maker.inputs, (a, b), strict=True)), maker.outputs)
    np.testing.assert_array_equal(results[maker.outputs[0]], a + b)
    np.testing.assert_array_equal(results[maker.outputs[1]], a - b)
    assert all(results[name].dtype == np.float32 for name in maker.outputs)


@every_backend
def test_an_output_may_be_asked_for_alone(maker: Maker, tmp_path: Path) -> None:
    with Loaded(add_sub(maker, tmp_path, batching=False)) as loaded:
        results = loaded.run(dict(zip(maker.inputs, (A, B), strict=True)), [maker.outputs[1]])
    np.testing.assert_array_equal(results[maker.outputs[1]], A - B)


@pytest.mark.parametrize(("maker", "datatype"), each_datatype())
def test_elements_of_every_type_come_back(maker: Maker, datatype: DataType, tmp_path: Path) -> None:
    array = some_elements(datatype, 10).reshape(2, 5)
    with Loaded(identity(maker, tmp_path, datatype, (5,))) as loaded:
        result = loaded.run({maker.inputs[0]: array}, maker.outputs[:1])[maker.outputs[0]]
    assert result.dtype == datatype.numpy
    np.testing.assert_array_equal(result, array)
    if datatype is DataType.BYTES:
        assert {type(element) for element in result.reshape(-1)} == {bytes}


@every_backend
def test_bytes_that_are_not_text(maker: Maker, tmp_path: Path) -> None:
    """They come back, or are refused with the name of the input; never changed."""
    if DataType.BYTES not in maker.datatypes:
        pytest.skip("no strings")
    array = np.array([[b"\xff\xfe"]], np.object_)
    with Loaded(identity(maker, tmp_path, DataType.BYTES, (1,))) as loaded:
        if maker.text_only:
            with pytest.raises(Exception, match=f"{maker.inputs[0]}.*not UTF-8"):
                loaded.run({maker.inputs[0]: array}, maker.outputs[:1])
        else:
            result = loaded.run({maker.inputs[0]: array}, maker.outputs[:1])[maker.outputs[0]]
            assert result.tolist() == [[b"\xff\xfe"]]


@every_backend
def test_shapes_may_change_from_run_to_run(maker: Maker, tmp_path: Path) -> None:
    with Loaded(identity(maker, tmp_path, DataType.FP32, (-1, -1))) as loaded:
        for shape in [(1, 2, 3), (4, 3, 1), (2, 0, 7), (1, 2, 3)]:
            array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            result = loaded.run({maker.inputs[0]: array}, maker.outputs[:1])[maker.outputs[0]]
            np.testing.assert_array_equal(result, array)


@every_backend
def test_inputs_may_lie_anywhere(maker: Maker, tmp_path: Path) -> None:
    """An input is a view of somebody's memory: not aligned, perhaps read-only."""
    memory = bytes(3) + A.tobytes()
    array = np.frombuffer(memory, np.uint8)[3:].view(np.float32).reshape(1, 4)
    assert not array.flags.aligned
    assert not array.flags.writeable
    with Loaded(identity(maker, tmp_path, DataType.FP32, (4,))) as loaded:
        result = loaded.run({maker.inputs[0]: array}, maker.outputs[:1])[maker.outputs[0]]
    np.testing.assert_array_equal(result, A.reshape(1, 4))


@every_backend
def test_numbers_without_dimensions(maker: Maker, tmp_path: Path) -> None:
    """The server has no tensors of rank 0: a configuration says [1] for them, and so are they sent."""
    if not maker.has_scalars:
        pytest.skip("no tensors of rank 0")
    config = configuration(
        maker, [tensor(maker.inputs[0], DataType.FP32, [1])], [tensor(maker.outputs[0], DataType.FP32, [1])]
    )
    with Loaded(model(maker, tmp_path / "scalar", maker.scalar, config)) as loaded:
        result = loaded.run({maker.inputs[0]: np.array([1.5], np.float32)}, maker.outputs[:1])[maker.outputs[0]]
    assert result.shape == (1,)
    assert result.tolist() == [3.0]


@every_backend
def test_reshape_is_what_the_model_sees(maker: Maker, tmp_path: Path) -> None:
    """The server turns `dims` into `reshape` and back; configurations are checked against the latter."""
    shapes = {"dims": [-1, 6], "reshape": {"shape": [2, -1, 3]}}
    config = configuration(
        maker,
        [{**tensor(maker.inputs[0], DataType.FP32, []), **shapes}],
        [{**tensor(maker.outputs[0], DataType.FP32, []), **shapes}],
        max_batch_size=8,
    )
    made = model(maker, tmp_path / "m", lambda path: maker.identity(path, DataType.FP32, (2, -1, 3)), config)
    array = np.arange(36, dtype=np.float32).reshape(2, 2, 3, 3)
    with Loaded(made) as loaded:
        result = loaded.run({maker.inputs[0]: array}, maker.outputs[:1])[maker.outputs[0]]
    np.testing.assert_array_equal(result, array)


@every_backend
def test_a_failed_run_says_why_and_does_no_lasting_harm(maker: Maker, tmp_path: Path) -> None:
    config = configuration(
        maker, [tensor(maker.inputs[0], DataType.FP32, [-1])], [tensor(maker.outputs[0], DataType.FP32, [2, 3])]
    )
    with Loaded(model(maker, tmp_path / "failing", maker.failing, config)) as loaded:
        with pytest.raises(Exception, match=r".{10}"):
            loaded.run({maker.inputs[0]: np.zeros(5, np.float32)}, maker.outputs[:1])
        result = loaded.run({maker.inputs[0]: np.ones(6, np.float32)}, maker.outputs[:1])[maker.outputs[0]]
    assert result.shape == (2, 3)


@every_backend
def test_two_instances_at_once(maker: Maker, tmp_path: Path) -> None:
    """Backends whose instances are threads run two of them at the same time in one process."""
    if backend_class(maker.backend).instances_as != "threads":
        pytest.skip("instances are processes")
    made = add_sub(maker, tmp_path, batching=True)
    wrong: list[str] = []

    def compute(loaded: Loaded, value: int) -> None:
        a = np.full((2, 4), value, np.float32)
        sums = [loaded.run(dict.fromkeys(maker.inputs, a), maker.outputs)[maker.outputs[0]] for _ in range(50)]
        wrong.extend(f"instance {value}: {found}" for found in sums if (found != 2 * a).any())

    with Loaded(made, 0) as first, Loaded(made, 1) as second:
        threads = [threading.Thread(target=compute, args=(it, i)) for i, it in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# --- loading ------------------------------------------------------------------------------------------------------


@every_backend
def test_a_missing_file_is_named(maker: Maker, tmp_path: Path) -> None:
    made = context(tmp_path / "empty", configuration(maker, [], []), maker.filename)
    with pytest.raises(Exception, match=maker.filename.replace(".", r"\.")):
        Loaded(made)


@every_backend
def test_a_damaged_file_fails_the_load(maker: Maker, tmp_path: Path) -> None:
    made = add_sub(maker, tmp_path, batching=False)
    for file in [made.path] if made.path.is_file() else made.path.rglob("*.*"):
        file.write_bytes(b"not a model (")
    with pytest.raises(Exception, match=r".{10}"):
        Loaded(made)


@every_backend
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "NOBODY"}, "NOBODY"),
        ({"data_type": "TYPE_INT32"}, "TYPE_INT32.*{name}"),
        ({"dims": [5]}, r"{name}.*5"),
    ],
    ids=["name", "data type", "dims"],
)
@pytest.mark.parametrize("side", ["input", "output"])
def test_a_configuration_that_contradicts_the_model_is_refused(
    maker: Maker, side: str, change: dict[str, Any], text: str, tmp_path: Path
) -> None:
    if not maker.checks_signature:
        pytest.skip("the model's files say nothing of inputs and outputs")
    if "data_type" in change and maker.converts_datatypes:
        pytest.skip("data types are converted")
    made = add_sub(maker, tmp_path, batching=True)
    made.config[side][1] = made.config[side][1] | change
    name = (maker.inputs if side == "input" else maker.outputs)[1]
    with pytest.raises(Exception, match=text.format(name=name)):
        Loaded(made)


# --- auto-completion ----------------------------------------------------------------------------------------------


def completed(made: ModelContext) -> ConfigDict:
    """What `autocomplete` makes of the configuration; `made` keeps its own."""
    before = json.dumps(made.config)
    config = backend_class(made.config["backend"]).autocomplete(made)
    assert json.dumps(made.config) == before, "autocomplete changed the configuration it was given"
    return made.config if config is None else config


def by_name(tensors: list[dict[str, Any]]) -> list[tuple[str, str, list[int]]]:
    return sorted((it["name"], it["data_type"], [int(dim) for dim in it["dims"]]) for it in tensors)


@every_backend
@pytest.mark.parametrize("batching", [True, False], ids=["batch", "no batch"])
def test_the_model_completes_its_configuration(maker: Maker, batching: bool, tmp_path: Path) -> None:
    if not maker.completes:
        pytest.skip("the model's files say nothing of inputs and outputs")
    config = {"backend": maker.backend, **maker.config}
    if batching and not maker.completes_batching:
        config["max_batch_size"] = 4
    made = model(maker, tmp_path / "m", lambda path: maker.add_sub(path, batching), config)
    complete = completed(made)
    assert by_name(complete["input"]) == [(name, "TYPE_FP32", [4]) for name in sorted(maker.inputs)]
    assert by_name(complete["output"]) == [(name, "TYPE_FP32", [4]) for name in sorted(maker.outputs)]
    assert complete.get("max_batch_size", 0) == (4 if batching else 0)
    if maker.completes_batching:
        assert ("dynamic_batching" in complete) is batching

    rows = (3,) if batching else ()
    a = np.ones((*rows, 4), np.float32)
    full = context(tmp_path / "m", complete, maker.filename)
    with Loaded(full) as loaded:
        results = loaded.run(dict.fromkeys(maker.inputs, a), maker.outputs)
    np.testing.assert_array_equal(results[maker.outputs[0]], a + a)


@every_backend
def test_a_complete_configuration_stays(maker: Maker, tmp_path: Path) -> None:
    made = add_sub(maker, tmp_path, batching=True)
    assert completed(made) == made.config | ({"dynamic_batching": {}} if maker.turns_on_batching else {})
