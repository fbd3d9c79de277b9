"""Heads that say two things about the size of their body."""

import httptools
import pytest

from naiad.frontends.http.head import Chunks, Head

BOTH = b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_chunks_count_where_a_length_is_given_too() -> None:
    head = Head(BOTH)
    assert (head.is_chunked, head.body_size) == (True, 0)
    chunks = Chunks()
    chunks.feed(b"4\r\nabcd\r\n0\r\n\r\n")
    assert (chunks.is_complete, b"".join(chunks.parts)) == (True, b"abcd")


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
