"""Header blocks: what is read of them, which are read once only, and what answers begin and end with."""

import hpack
import pytest

from naiad.frontends.grpc.head import Head, HeaderDecoder, literal, trailers

CALL = [(":method", "POST"), (":scheme", "http"), (":path", "/a/B"), ("te", "trailers"), ("x-color", "red")]


def test_a_block_is_decoded_once_as_long_as_it_means_the_same() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    first, again = encoder.encode(CALL), encoder.encode(CALL)
    assert first != again, "the second one refers to the table"
    heads = [decoder.decode(block) for block in (first, again, again)]
    assert [(head.path, head.metadata) for head in heads] == 3 * [("/a/B", (("x-color", "red"),))]
    assert heads[1] is heads[2]
    # One more entry, and all that the block refers to is another one.
    decoder.decode(encoder.encode([*CALL, ("x-color", "blue")]))
    assert decoder.decode(again).malformed


def test_a_block_that_fills_the_table_is_decoded_each_time() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    encoder.header_table_size = 64
    for color in ("red", "blue", "red"):
        head = decoder.decode(encoder.encode([*CALL[:4], ("x-color", color)]))
        assert head.metadata == (("x-color", color),)


def test_a_block_that_changes_the_size_of_the_table_is_decoded_each_time() -> None:
    decoder = HeaderDecoder()
    encoder = hpack.Encoder()
    block = encoder.encode(CALL)
    decoder.decode(block)
    shrinking = b"\x20" + b"\x83\x86" + literal(b":path", b"/a/B")
    assert decoder.decode(shrinking).path == decoder.decode(shrinking).path == "/a/B"
    with pytest.raises(hpack.HPACKError):
        decoder.decode(encoder.encode(CALL))


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 4e-3), ("5u", 5e-6), ("6n", 6e-9), ("99999999S", 99999999)],
)
def test_timeouts(timeout: str, seconds: float) -> None:
    head = Head([(name.encode(), value.encode()) for name, value in [*CALL, ("grpc-timeout", timeout)]])
    assert head.timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("timeout", ["", "S", "1", "1s", "-1S", "999999999S", "1.5S", "\u0661S"])
def test_timeouts_that_are_none(timeout: str) -> None:
    head = Head([(name.encode(), value.encode()) for name, value in [*CALL, ("grpc-timeout", timeout)]])
    assert (head.timeout_s, bool(head.error)) == (-1, True)


@pytest.mark.parametrize(
    ("details", "sent"),
    [
        ("", None),
        ("plain text", b"plain text"),
        ("100 %", b"100 %25"),
        ("a\nb\u20ac", b"a%0Ab%E2%82%AC"),
        ("x" * 300, b"x" * 300),
    ],
)
def test_trailers(details: str, sent: bytes | None) -> None:
    pairs = [(bytes(name), bytes(value)) for name, value in hpack.Decoder().decode(trailers(5, details), raw=True)]
    expected = [(b"grpc-status", b"5")] + ([(b"grpc-message", sent)] if sent is not None else [])
    assert pairs == expected
