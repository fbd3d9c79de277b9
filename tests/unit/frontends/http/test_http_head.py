"""Heads that say two things about the size of their body."""

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.frontends.http.head import Chunks, Head

BOTH = b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_chunks_count_where_a_length_is_given_too() -> None:
    head = Head(BOTH)
    assert (head.is_chunked, head.body_size) == (True, 0)
    chunks = Chunks()
    chunks.feed(b"4\r\nabcd\r\n0\r\n\r\n")
    assert (chunks.is_complete, b"".join(chunks.parts)) == (True, b"abcd")


BODY = b'5\r\nab\r\nc\r\n0A;a=b;c="d"\r\n0123456789\r\n0;x\r\nContent-Length: 3\r\nX: 0\r\n\r\n'


@given(st.lists(st.integers(0, len(BODY) + 3), max_size=6))
def test_chunks_may_come_in_any_pieces(cuts: list[int]) -> None:
    data = BODY + b"GET"
    chunks = Chunks()
    ends = [*sorted(cuts), len(data)]
    for start, end in zip([0, *ends], ends, strict=False):
        if chunks.is_complete:
            chunks.rest += data[start:end]
        else:
            chunks.feed(data[start:end])
    assert (b"".join(chunks.parts), chunks.size, chunks.count) == (b"ab\r\nc0123456789", 15, 3)
    assert (chunks.is_complete, chunks.rest) == (True, b"GET")


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\n",
        b"0x1\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1_0\r\n",
        b"1\na\r\n",
        b"1\na\n0\n\n",
        b"1\r\na\n",
        b"0\r\n\n",
        b"1;a\nb\r\n",
        b"\xb2\r\n",
        b"1" * 17 + b"\r\n",
        b"1\r\nab\r\n",
        b"1\r\na0\r\n",
        b"0\r\nA: b\n\n\r\n",
        b"0\r\nA: b\rC: d\r\n",
        b"1;" + b"a" * 20_000,
        b"0\r\n" + b"a" * 20_000,
        b"1\r\n" + b"a" * 20_000,
    ],
)
def test_what_are_no_chunks_is_refused(data: bytes) -> None:
    for step in (1, len(data)):
        with pytest.raises(httptools.HttpParserError):
            feed(data, step)


def feed(data: bytes, step: int) -> None:
    chunks = Chunks()
    for start in range(0, len(data), step):
        chunks.feed(data[start : start + step])


def test_nothing_is_read_behind_a_request_of_doubtful_size() -> None:
    assert not Head(BOTH).keep_alive
    assert Head(BOTH.replace(b"Content-Length: 9\r\n", b"")).keep_alive


@pytest.mark.parametrize(
    ("encoding", "is_known"), [("chunked", True), ("gzip, Chunked", True), ("gzip", False), ("chunked, gzip", False)]
)
@pytest.mark.parametrize("offer", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_bodies_must_have_an_end(encoding: str, is_known: bool, offer: str) -> None:
    head = f"POST /v2 HTTP/1.1\r\n{offer}Transfer-Encoding: {encoding}\r\n\r\n".encode()
    if is_known:
        assert Head(head).is_chunked
    else:
        with pytest.raises(httptools.HttpParserError):
            Head(head)


def test_two_lengths_stay_refused() -> None:
    with pytest.raises(httptools.HttpParserError):
        Head(b"POST /v2 HTTP/1.1\r\nContent-Length: 9\r\nContent-Length: 8\r\n\r\n")


def test_a_length_may_have_any_number_of_zeros() -> None:
    for zeros in (0, 1, 5000):
        for length in (0, 7):
            head = b"POST /v2 HTTP/1.1\r\nContent-Length: %b%d\r\n\r\n" % (b"0" * zeros, length)
            assert Head(head).body_size == length


def test_the_last_of_several_encodings_counts() -> None:
    head = b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: %b\r\nTransfer-Encoding: %b\r\n\r\n"
    assert Head(head % (b"gzip", b"chunked")).is_chunked
    with pytest.raises(httptools.HttpParserError):
        Head(head % (b"chunked", b"gzip"))


def test_of_several_values_of_a_header_the_first_counts() -> None:
    headers = Head(b"GET /v2 HTTP/1.1\r\nAccept-Encoding: gzip\r\naccept-encoding: identity\r\n\r\n").headers
    assert headers.get("accept-encoding") == "gzip"


def test_empty_lines_alone_are_no_head() -> None:
    assert Head(b"\r\nGET /v2 HTTP/1.1\r\n\r\n").path == "/v2"
    with pytest.raises(httptools.HttpParserError):
        Head(b"\r\n\r\n")


def test_a_method_that_nobody_knows_is_a_method() -> None:
    head = Head(b"FROBNICATE /v2 HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
    assert (head.method, head.path, head.body_size, head.keep_alive) == ("FROBNICATE", "/v2", 3, True)
    for text in (b"get /v2 HTTP/1.1\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"F@O /v2 HTTP/1.1\r\n\r\n"):
        with pytest.raises(httptools.HttpParserError):
            Head(text)
