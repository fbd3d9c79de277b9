"""The data behind the example `digits`: scikit-learn's handwritten digits, and which of them the model never saw.

The data set comes with scikit-learn, so whoever trains the model or shows it off needs that package; the server
and the example repository do not.
"""

import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    raise ImportError("the digits come with scikit-learn: pip install scikit-learn") from error

#: Fixes which images are held out. The model in the package was trained with it; change both or none.
SEED = 2
HELD_OUT = 360

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def holdout() -> tuple[Images, Labels]:
    """The 360 of the 1797 digits that the model was not trained on.

    Images are [360, 8, 8], from 0 (paper) to 16 (ink); labels are the 360 digits they show. As a request for the
    model `digits` wants them: `images.reshape(-1, 64)`.
    """
    _, images, _, labels = _split()
    return images, labels


def training() -> tuple[Images, Labels]:
    """The digits to train on, as `holdout` gives the others."""
    images, _, labels, _ = _split()
    return images, labels


def as_png(image: Images) -> bytes:
    """An image, [8, 8] from 0 to 16, as a PNG file with 8 bits of gray, for the models `digits_png` and `digits_from_png`."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = image.shape
    # The 0 before each row: its bytes are not predicted from others.
    rows = b"".join(b"\0" + row.tobytes() for row in np.rint(image * (255 / 16)).astype(np.uint8))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in parts)


def _split() -> list[npt.NDArray[Any]]:
    digits = load_digits()
    parts: list[npt.NDArray[Any]] = train_test_split(
        digits.images.astype(np.float32),
        digits.target.astype(np.int64),
        test_size=HELD_OUT,
        random_state=SEED,
        stratify=digits.target,
    )
    return parts
