"""What a model runs on, from its configuration and its files."""

import pytest

from naiad.config.platforms import Choice, infer, is_pair, is_runtime
from naiad.errors import InvalidArgument

FILE, DIRECTORY = False, True


@pytest.mark.parametrize(
    ("given", "entries", "expected"),
    [
        # from the files alone
        (("", "", ""), {"model.graphdef": FILE}, ("tensorflow_graphdef", "tensorflow", "model.graphdef")),
        (("", "", ""), {"model.savedmodel": DIRECTORY}, ("tensorflow_savedmodel", "tensorflow", "model.savedmodel")),
        (("", "", ""), {"model.plan": FILE}, ("tensorrt_plan", "tensorrt", "model.plan")),
        (("", "", ""), {"model.onnx": FILE}, ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        (("", "", ""), {"model.onnx": DIRECTORY}, ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        (("", "", ""), {"model.xml": FILE, "model.bin": FILE}, ("", "openvino", "model.xml")),
        (("", "", ""), {"model.pt": FILE}, ("pytorch_libtorch", "pytorch", "model.pt")),
        (("", "", ""), {"model.pt2": FILE}, ("torch_aoti", "pytorch", "model.pt2")),
        (("", "", ""), {"model.py": FILE}, ("", "python", "model.py")),
        # the order of the table decides
        (("", "", ""), {"model.py": FILE, "model.onnx": FILE}, ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        (("", "", ""), {"model.py": FILE, "model.pt": FILE}, ("pytorch_libtorch", "pytorch", "model.pt")),
        # a folder where a file belongs is not the model, nor the reverse
        (("", "", ""), {"model.savedmodel": FILE, "model.py": FILE}, ("", "python", "model.py")),
        (("", "", ""), {"model.plan": DIRECTORY, "model.py": FILE}, ("", "python", "model.py")),
        # the rest of a row from one of its fields
        (("tensorflow_graphdef", "", ""), None, ("tensorflow_graphdef", "tensorflow", "model.graphdef")),
        (("onnxruntime_onnx", "", ""), {"model.py": FILE}, ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        (("", "onnxruntime", ""), None, ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        (("", "onnxruntime", "other.onnx"), None, ("onnxruntime_onnx", "onnxruntime", "other.onnx")),
        (("", "pytorch", ""), None, ("pytorch_libtorch", "pytorch", "model.pt")),
        (("torch_aoti", "", ""), None, ("torch_aoti", "pytorch", "model.pt2")),
        (("", "python", ""), None, ("", "python", "model.py")),
        (("", "openvino", ""), None, ("", "openvino", "model.xml")),
        (("", "", "model.onnx"), None, ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        (("", "", "model.py"), {"model.onnx": FILE}, ("", "python", "model.py")),
        # nothing tells which TensorFlow format it is
        (("", "tensorflow", ""), None, ("", "tensorflow", "")),
        (
            ("", "tensorflow", ""),
            {"model.savedmodel": DIRECTORY},
            ("tensorflow_savedmodel", "tensorflow", "model.savedmodel"),
        ),
        # backends outside of the table
        (("", "identity", ""), {"model.py": FILE}, ("", "identity", "")),
        # left for validation to refuse
        (("libtorch", "", ""), None, ("libtorch", "pytorch", "model.pt")),
        (("some_platform", "", ""), {"model.py": FILE}, ("some_platform", "", "")),
        (("tensorflo", "", "model.savedmodel"), {"model.savedmodel": DIRECTORY}, ("tensorflo", "", "model.savedmodel")),
        (("onnx", "", "model.onnx"), {"model.onnx": FILE}, ("onnx", "onnxruntime", "model.onnx")),
        (("", "", "weights.bin"), {"model.py": FILE}, ("", "", "weights.bin")),
        (("ensemble", "", ""), {"model.py": FILE}, ("ensemble", "", "")),
    ],
)
def test_choice(given: tuple[str, str, str], entries: dict[str, bool] | None, expected: tuple[str, str, str]) -> None:
    assert infer("m", Choice(*given), entries) == Choice(*expected)


def test_the_model_name_may_say_the_backend() -> None:
    assert infer("model.my.backend", Choice("", "", ""), {}) == Choice("", "my.backend", "model.my.backend")


@pytest.mark.parametrize("entries", [None, {}, {"weights.bin": FILE}])
def test_nothing_says_the_backend(entries: dict[str, bool] | None) -> None:
    with pytest.raises(InvalidArgument, match="Could not determine backend for model 'm' with no backend"):
        infer("m", Choice("", "", ""), entries)


@pytest.mark.parametrize(
    ("backend", "runtime", "fits"),
    [
        ("python", "", True),
        ("python", "libtriton_python.so", True),
        ("pytorch", "model.py", True),
        ("python", "libtriton_onnxruntime.so", False),
        ("onnxruntime", "my.so", False),
        ("custom", "my.so", True),
    ],
)
def test_runtimes(backend: str, runtime: str, fits: bool) -> None:
    assert is_runtime(backend, runtime) is fits


@pytest.mark.parametrize(
    ("platform", "backend", "fits"),
    [
        ("onnxruntime_onnx", "onnxruntime", True),
        ("tensorflow_graphdef", "tensorflow", True),
        ("tensorflow_savedmodel", "tensorflow", True),
        ("torch_aoti", "pytorch", True),
        ("", "onnxruntime", False),
        ("libtorch", "pytorch", False),
        ("tensorrt_plan", "onnxruntime", False),
        ("anything", "python", True),
        ("anything", "custom", True),
    ],
)
def test_pairs(platform: str, backend: str, fits: bool) -> None:
    assert is_pair(platform, backend) is fits
