"""SavedModels and GraphDefs, made with TensorFlow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from makers import ALL, Maker
from naiad.datatypes import DataType

#: Names in TensorFlow where they are not those of numpy.
TYPE_NAMES = {
    DataType.BYTES: "string",
    DataType.FP16: "float16",
    DataType.FP32: "float32",
    DataType.FP64: "float64",
}


def tf_type(datatype: DataType) -> Any:
    import tensorflow as tf

    return getattr(tf, TYPE_NAMES.get(datatype, datatype.name.lower()))


def spec(name: str, shape: tuple[int | None, ...] | None, datatype: DataType = DataType.FP32) -> Any:
    """An input of a function. -1 and None are open extents."""
    import tensorflow as tf

    open_shape = None if shape is None else [None if dim == -1 else dim for dim in shape]
    return tf.TensorSpec(open_shape, tf_type(datatype), name=name)


def save_functions(path: Path, **signatures: tuple[Callable[..., Any], list[Any]]) -> None:
    """A SavedModel of TensorFlow 2. Functions return dictionaries."""
    import tensorflow as tf

    module = tf.Module()
    functions = {
        name: tf.function(function, input_signature=specs).get_concrete_function()
        for name, (function, specs) in signatures.items()
    }
    tf.saved_model.save(module, str(path), signatures=functions)


def write_graph(path: Path, build: Callable[[Any], None]) -> None:
    """A GraphDef; `build` is given tf.compat.v1 inside the graph."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        build(tf.compat.v1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(graph.as_graph_def().SerializeToString())


class SavedModelMaker(Maker):
    backend = "tensorflow"
    requires = ("tensorflow",)
    filename = "model.savedmodel"
    datatypes = ALL - {DataType.BF16}
    turns_on_batching = True
    config = {"platform": "tensorflow_savedmodel"}  # noqa: RUF012

    def add_sub(self, path: Path, batching: bool) -> None:
        shape = (None, 4) if batching else (4,)
        save_functions(
            path,
            serving_default=(
                lambda a, b: {"OUTPUT0": a + b, "OUTPUT1": a - b},
                [spec("INPUT0", shape), spec("INPUT1", shape)],
            ),
        )

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        import tensorflow as tf

        inputs = [spec("INPUT0", (None, *dims), datatype)]
        save_functions(path, serving_default=(lambda x: {"OUTPUT0": tf.identity(x)}, inputs))

    def scalar(self, path: Path) -> None:
        save_functions(path, serving_default=(lambda x: {"OUTPUT0": x + x}, [spec("INPUT0", ())]))

    def failing(self, path: Path) -> None:
        import tensorflow as tf

        function = lambda x: {"OUTPUT0": tf.reshape(x, [2, 3])}  # noqa: E731
        save_functions(path, serving_default=(function, [spec("INPUT0", (None,))]))

    def __repr__(self) -> str:
        return "tensorflow_savedmodel"


class GraphDefMaker(Maker):
    backend = "tensorflow"
    requires = ("tensorflow",)
    filename = "model.graphdef"
    datatypes = ALL - {DataType.BF16}
    config = {"platform": "tensorflow_graphdef"}  # noqa: RUF012

    def add_sub(self, path: Path, batching: bool) -> None:
        def build(v1: Any) -> None:
            shape = [None, 4] if batching else [4]
            a, b = (v1.placeholder(v1.float32, shape, name) for name in self.inputs)
            v1.add(a, b, name="OUTPUT0")
            v1.subtract(a, b, name="OUTPUT1")

        write_graph(path, build)

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        def build(v1: Any) -> None:
            shape = [None, *(None if dim == -1 else dim for dim in dims)]
            v1.identity(v1.placeholder(tf_type(datatype), shape, "INPUT0"), name="OUTPUT0")

        write_graph(path, build)

    def scalar(self, path: Path) -> None:
        def build(v1: Any) -> None:
            x = v1.placeholder(v1.float32, [], "INPUT0")
            v1.add(x, x, name="OUTPUT0")

        write_graph(path, build)

    def failing(self, path: Path) -> None:
        write_graph(path, lambda v1: v1.reshape(v1.placeholder(v1.float32, [None], "INPUT0"), [2, 3], name="OUTPUT0"))

    def __repr__(self) -> str:
        return "tensorflow_graphdef"
