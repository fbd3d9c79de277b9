"""From PNG files to the 8 x 8 images that the model `digits` reads.

A Python model is a class TritonPythonModel with a method `execute`; `initialize` and `finalize`, which run when
the model is loaded and unloaded, may be left out. The PNG decoder below needs numpy only.
"""

import struct
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils

SIDE = 8  # pixels of an image of the data set, in both directions
INK = 16.0  # the brightest pixel there


class TritonPythonModel:
    def execute(self, requests):
        """Answers each request of the batch, in their order. A bad file fails its own request only."""
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "PNG").as_numpy()  # [batch, 1] of bytes
            try:
                images = np.stack([to_digit(decode_png(file)) for file in files.reshape(-1)])
            except ValueError as error:
                refusal = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=refusal))
            else:
                output = pb_utils.Tensor("IMAGE", images.reshape(-1, SIDE * SIDE))
                responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses


def to_digit(gray):
    """A picture of one digit, [height, width] from 0 (black) to 1 (white), as the model wants it: [8, 8] from 0 to 16.

    Both bright on dark and dark on bright will do: the border of a picture of a digit is mostly paper.
    """
    border = np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])
    ink = 1 - gray if np.median(border) > 0.5 else gray
    height, width = gray.shape
    return (average(height) @ ink @ average(width).T * INK).astype(np.float32)


def average(length):
    """The matrix [8, length] that takes `length` pixels to the means of 8 equal stretches of them."""
    edges = np.linspace(0, length, SIDE + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.clip(overlap, 0, None) * SIDE / length


# --- PNG ---------------------------------------------------------------------------------------------------------

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type: gray, RGB, palette, gray + alpha, RGB + alpha
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
MOST_PIXELS = 1 << 24  # a small file can promise a picture that fills the memory


def decode_png(data):
    """The gray values of a PNG file, [height, width] from 0 (black) to 1 (white). Transparency is ignored.

    Raises ValueError for what is not a PNG file, is damaged, or is interlaced.
    """
    width, height, depth, colour, palette, compressed = read_chunks(data)
    channels = CHANNELS[colour]
    stride = (width * channels * depth + 7) // 8
    lines = inflate(compressed, height * (stride + 1)).reshape(height, stride + 1)
    rows = unfilter(lines, max(1, channels * depth // 8))
    if depth < 8:
        bits = np.unpackbits(rows, axis=1)[:, : width * depth].reshape(height, width, depth)
        samples = bits @ (1 << np.arange(depth)[::-1])
    else:
        samples = rows.reshape(-1).view(">u2" if depth == 16 else np.uint8)
    samples = samples.reshape(height, width, channels)
    if colour == 3:
        if samples.max() >= len(palette):
            raise ValueError("damaged PNG file: a pixel has a colour that is not in the palette")
        return luminance(palette[samples[:, :, 0]] / 255)
    values = samples / ((1 << depth) - 1)
    return luminance(values) if colour in (2, 6) else values[:, :, 0]


def luminance(rgb):
    return rgb[:, :, :3] @ np.array([0.299, 0.587, 0.114])


def read_chunks(data):
    """Width, height, bits per sample, colour type, palette [n, 3] and compressed pixels of a PNG file."""
    if not data.startswith(SIGNATURE):
        raise ValueError("not a PNG file")
    at = len(SIGNATURE)
    header, palette, pixels = None, np.empty((0, 3), np.uint8), []
    while True:
        if at + 8 > len(data):
            raise ValueError("damaged PNG file: it ends too early")
        length, kind = struct.unpack_from(">I4s", data, at)
        content = data[at + 8 : at + 8 + length]
        at += 12 + length
        if at > len(data):
            raise ValueError("damaged PNG file: it ends too early")
        if struct.unpack_from(">I", data, at - 4)[0] != zlib.crc32(kind + content):
            raise ValueError("damaged PNG file: a checksum is wrong")
        if kind == b"IHDR" and length == 13:
            header = struct.unpack(">IIBBBBB", content)
        elif kind == b"PLTE" and length % 3 == 0:
            palette = np.frombuffer(content, np.uint8).reshape(-1, 3)
        elif kind == b"IDAT":
            pixels.append(content)
        elif kind == b"IEND":
            break
    if header is None:
        raise ValueError("damaged PNG file: it has no header")
    width, height, depth, colour, _, _, interlaced = header
    if depth not in DEPTHS.get(colour, ()) or width == 0 or height == 0:
        raise ValueError("damaged PNG file: its header is wrong")
    if interlaced:
        raise ValueError("interlaced PNG files are not supported; save it without interlacing")
    if width * height > MOST_PIXELS:
        raise ValueError(f"the picture has {width} x {height} pixels; at most {MOST_PIXELS} are supported")
    return width, height, depth, colour, palette, b"".join(pixels)


def inflate(compressed, size):
    try:
        data = zlib.decompressobj().decompress(compressed, size)
    except zlib.error as error:
        raise ValueError(f"damaged PNG file: {error}") from error
    if len(data) != size:
        raise ValueError("damaged PNG file: it has too few pixels")
    return np.frombuffer(data, np.uint8)


def unfilter(lines, step):
    """Undoes PNG's filters: each line's first byte says how its bytes were predicted from those `step` before them
    and from the line above."""
    rows = np.zeros((len(lines), lines.shape[1] - 1), np.uint8)
    above = np.zeros(rows.shape[1], np.uint8)
    for row, line in zip(rows, lines, strict=True):
        kind, row[:] = line[0], line[1:]
        if kind == 1:
            for channel in range(step):
                row[channel::step] = np.cumsum(row[channel::step], dtype=np.uint8)
        elif kind == 2:
            row += above
        elif kind in (3, 4):
            row[:] = predicted(row.tolist(), above.tolist(), step, paeth if kind == 4 else mean)
        elif kind != 0:
            raise ValueError("damaged PNG file: unknown filter")
        above = row
    return rows


def predicted(row, above, step, predict):
    for i, above_it in enumerate(above):
        left, corner = (row[i - step], above[i - step]) if i >= step else (0, 0)
        row[i] = (row[i] + predict(left, above_it, corner)) & 255
    return row


def mean(left, above, corner):
    return (left + above) // 2


def paeth(left, above, corner):
    """Whichever of the three is nearest to left + above - corner."""
    to_left, to_above, to_corner = abs(above - corner), abs(left - corner), abs(left + above - 2 * corner)
    if to_left <= to_above and to_left <= to_corner:
        return left
    return above if to_above <= to_corner else corner
