"""The example repository: written whole, its classifier right about digits it never saw, its PNG decoder right."""

import struct
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from naiad import examples
from naiad.errors import AlreadyExists, NaiadError, Unavailable

REPOSITORY = Path(examples.__file__).parent / "repository"


class TestWriteExample:
    def test_writes_every_model(self, tmp_path: Path) -> None:
        folders = examples.write_example(tmp_path / "new" / "models")
        names = ["digits", "digits_cascade", "digits_from_png", "digits_linear", "digits_png", "running_sum", "words"]
        assert [folder.name for folder in folders] == names
        assert sorted(folder.name for folder in (tmp_path / "new/models").iterdir()) == names
        assert (tmp_path / "new/models/digits/1/model.onnx").stat().st_size > 10_000
        assert (tmp_path / "new/models/digits/labels.txt").read_text().split()[:2] == ["zero", "one"]
        assert all((folder / "config.pbtxt").is_file() for folder in folders)
        # A version needs its folder, even if there is nothing to put into it.
        assert all((folder / "1").is_dir() for folder in folders)
        assert not list(tmp_path.rglob("__pycache__"))

    def test_writes_nothing_where_a_framework_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(examples, "installed", lambda: ["torch"])
        with pytest.raises(Unavailable, match=r"not installed: openvino; try: pip install 'naiad\[openvino\]'"):
            examples.write_example(tmp_path / "models", ["torch", "openvino"])
        assert not list(tmp_path.iterdir())

    def test_a_framework_that_fails_leaves_nothing_and_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(examples, "installed", lambda: ["torch"])
        with pytest.raises(NaiadError, match=r"the models of torch could not be written:(?s:.*)libtorch is broken"):
            examples.write_example(tmp_path / "models", ["torch"])
        assert not (tmp_path / "models").exists()

    @pytest.mark.parametrize("framework", examples.FRAMEWORKS)
    def test_writes_models_of_frameworks(self, framework: str, tmp_path: Path) -> None:
        if framework not in examples.installed():
            pytest.skip(f"{framework} is not installed")
        folders = examples.write_example(tmp_path / "models", [framework])
        assert [folder.name for folder in folders] == [*examples.MODELS, *examples.FRAMEWORKS[framework]]
        for name in examples.FRAMEWORKS[framework]:
            files = [path for path in (tmp_path / "models" / name / "1").rglob("*") if path.is_file()]
            assert files
            assert sum(path.stat().st_size for path in files) < 200_000

    def test_never_overwrites(self, tmp_path: Path) -> None:
        (tmp_path / "digits_png").mkdir()
        with pytest.raises(AlreadyExists, match="digits_png"):
            examples.write_example(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["digits_png"]


@pytest.fixture(scope="module", params=["digits", "digits_linear"])
def classifier(request: pytest.FixtureRequest) -> Any:
    ort = pytest.importorskip("onnxruntime")
    file = REPOSITORY / request.param / "1" / "model.onnx"
    return request.param, ort.InferenceSession(file, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def unseen() -> Any:
    """Images and labels."""
    pytest.importorskip("sklearn")
    from naiad.examples.digits import holdout

    return holdout()


class TestClassifier:
    def test_is_right_about_digits_it_never_saw(self, classifier: Any, unseen: Any) -> None:
        images, labels = unseen
        model, session = classifier
        probabilities, answers = session.run(["PROBABILITIES", "LABEL"], {"IMAGE": images.reshape(-1, 64)})
        assert (answers[:, 0] == labels).mean() >= (0.97 if model == "digits" else 0.95)
        assert (probabilities.argmax(axis=1) == answers[:, 0]).all()
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)

    def test_nothing_of_the_training_is_held_out(self, unseen: Any) -> None:
        from naiad.examples.digits import training

        seen = {image.tobytes() for image in training()[0]}
        assert len(seen) == 1797 - 360
        assert not [image for image in unseen[0] if image.tobytes() in seen]


def test_frameworks_get_the_network_of_the_onnx_file(unseen: Any) -> None:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(REPOSITORY / "digits" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    weights = np.load(REPOSITORY.parent / "weights.npz")
    pixels = unseen[0].reshape(-1, 64)
    scores = np.maximum(pixels / 16 @ weights["w1"] + weights["b1"], 0) @ weights["w2"] + weights["b2"]
    (probabilities,) = session.run(["PROBABILITIES"], {"IMAGE": pixels})
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


@pytest.fixture(scope="module")
def png() -> Any:
    """1/model.py of digits_png. Only its `execute` needs the module that the server offers to models."""
    module = types.ModuleType("digits_png_model")
    source = REPOSITORY / "digits_png" / "1" / "model.py"
    name = "triton_python_backend_utils"
    before = sys.modules.get(name)
    sys.modules[name] = types.ModuleType(name)
    try:
        exec(compile(source.read_text(), source, "exec"), vars(module))
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
    return module


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_file(
    width: int, height: int, depth: int, colour: int, lines: bytes, interlaced: int = 0, *more: bytes
) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *more,
            chunk(b"IDAT", zlib.compress(lines)),
            chunk(b"IEND", b""),
        ]
    )


def filtered(rows: np.ndarray[Any, Any], step: int, kind: int) -> bytes:
    """`rows` of bytes, each line predicted by PNG's filter `kind`; written from the standard, not from the decoder."""
    lines = []
    above = [0] * rows.shape[1]
    for row in rows.tolist():
        line = [kind]
        for i, value in enumerate(row):
            a, b, c = (row[i - step] if i >= step else 0), above[i], (above[i - step] if i >= step else 0)
            p = a + b - c
            nearest = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
            line.append((value - (0, a, b, (a + b) // 2, nearest)[kind]) % 256)
        lines.append(bytes(line))
        above = row
    return b"".join(lines)


GRAY = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10


class TestDecodePng:
    @pytest.mark.parametrize("kind", range(5), ids=["none", "sub", "up", "average", "paeth"])
    @pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
    @pytest.mark.parametrize("depth", [8, 16])
    def test_filters_channels_depths(self, kind: int, colour: int, channels: int, depth: int, png: Any) -> None:
        samples = np.random.default_rng(kind).integers(0, 1 << depth, (5, 7, channels))
        rows = samples.astype(">u2" if depth == 16 else np.uint8).reshape(5, -1).view(np.uint8)
        file = png_file(7, 5, depth, colour, filtered(rows, channels * depth // 8, kind))
        values = samples / (2**depth - 1)
        expected = values[:, :, :3] @ [0.299, 0.587, 0.114] if channels > 2 else values[:, :, 0]
        np.testing.assert_allclose(png.decode_png(file), expected)

    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_several_pixels_in_a_byte(self, depth: int, png: Any) -> None:
        samples = np.arange(15).reshape(3, 5) % (1 << depth)
        bits = (samples[:, :, None] >> np.arange(depth)[::-1]) & 1
        rows = np.packbits(bits.reshape(3, -1).astype(np.uint8), axis=1)
        file = png_file(5, 3, depth, 0, filtered(rows, 1, 0))
        np.testing.assert_allclose(png.decode_png(file), samples / (2**depth - 1))

    def test_a_palette(self, png: Any) -> None:
        palette = chunk(b"PLTE", bytes([0, 0, 0, 255, 255, 255, 255, 0, 0]))
        file = png_file(3, 1, 8, 3, b"\x00\x01\x02\x00", 0, palette)
        np.testing.assert_allclose(png.decode_png(file), [[1, 0.299, 0]])
        with pytest.raises(ValueError, match="not in the palette"):
            png.decode_png(png_file(1, 1, 8, 3, b"\x00\x03", 0, palette))

    @pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
    def test_what_pillow_writes(self, mode: str, png: Any, tmp_path: Path) -> None:
        image_module = pytest.importorskip("PIL.Image")
        gray = (np.add.outer(np.arange(30), np.arange(40)) * 3 % 256).astype(np.uint8)
        if mode == "I;16":
            image = image_module.fromarray(gray.astype(np.uint16) * 257)
        else:
            image = image_module.fromarray(gray).convert(mode)
        image.save(tmp_path / "it.png")
        with image_module.open(tmp_path / "it.png") as saved:
            bits_16 = mode == "I;16"
            expected = np.asarray(saved) / 65535 if bits_16 else np.asarray(saved.convert("RGB"))[:, :, 0] / 255
        np.testing.assert_allclose(png.decode_png((tmp_path / "it.png").read_bytes()), expected, atol=1e-6)

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            (b"GIF89a", "not a PNG file"),
            (b"", "not a PNG file"),
            (png_file(6, 4, 8, 0, filtered(GRAY, 1, 0))[:40], "ends too early"),
            (png_file(6, 4, 8, 0, filtered(GRAY, 1, 0)).replace(b"IDAT", b"IDAX"), "checksum"),
            (png_file(6, 5, 8, 0, filtered(GRAY, 1, 0)), "too few pixels"),
            (png_file(6, 4, 8, 0, filtered(GRAY, 1, 0), 1), "interlaced"),
            (png_file(6, 4, 8, 5, filtered(GRAY, 1, 0)), "header is wrong"),
            (png_file(0, 4, 8, 0, b""), "header is wrong"),
            (png_file(1, 1, 8, 0, b"\x07\x00"), "unknown filter"),
            (png_file(1 << 20, 1 << 20, 8, 0, b""), "at most"),
            (b"\x89PNG\r\n\x1a\n" + chunk(b"IEND", b""), "no header"),
        ],
    )
    def test_refused(self, file: bytes, text: str, png: Any) -> None:
        with pytest.raises(ValueError, match=text):
            png.decode_png(file)


class TestToDigit:
    def test_the_images_of_the_data_set_come_through(self, unseen: Any, png: Any) -> None:
        for image in unseen[0]:
            np.testing.assert_allclose(png.to_digit(image / 16), image, atol=1e-4)

    def test_images_become_png_files_and_come_back(self, unseen: Any, png: Any) -> None:
        from naiad.examples.digits import as_png

        for image in unseen[0]:
            np.testing.assert_allclose(png.to_digit(png.decode_png(as_png(image))), image, atol=0.5 * 16 / 255 + 1e-4)

    def test_dark_on_bright_is_turned_around(self, png: Any) -> None:
        ink = np.zeros((8, 8))
        ink[2:6, 3:5] = 1
        np.testing.assert_allclose(png.to_digit(1 - ink), png.to_digit(ink))

    @pytest.mark.parametrize(("height", "width"), [(16, 16), (24, 8), (13, 21), (5, 3)])
    def test_other_sizes_are_averaged(self, height: int, width: int, png: Any) -> None:
        """Each of the 8 x 8 pixels is the mean of its part of the picture: a picture of 8 x 8 blocks keeps its blocks."""
        gray = np.random.default_rng(0).random((height, width)) / 2
        blocks = np.repeat(np.repeat(gray, 8, axis=0), 8, axis=1).reshape(8, height, 8, width).mean(axis=(1, 3))
        result = png.to_digit(gray)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, 16 * blocks, rtol=1e-5)
