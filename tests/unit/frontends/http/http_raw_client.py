"""A minimal HTTP/1.1 client that sends paths and headers as they are."""

import asyncio
import json
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str, str]:
        """(status, content type, text) of an error."""
        return self.status, self.headers["content-type"], self.json["error"]

    @property
    def tail(self) -> bytes:
        return self.body[int(self.headers["inference-header-content-length"]) :]


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    status = int((await reader.readline()).split()[1])
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Answer(status, headers, body)


def request_bytes(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = {"Host": "localhost", "Content-Length": str(len(body))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    async def send(
        self, method: str, path: str, body: bytes | Any = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own; a body that is not bytes is sent as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request_bytes(method, path, raw, headers or {}))
            return await read_answer(reader)
        finally:
            writer.close()
            await writer.wait_closed()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return await self.send("GET", path, headers=headers)

    async def post(self, path: str, body: bytes | Any = b"", headers: dict[str, str] | None = None) -> Answer:
        return await self.send("POST", path, body, headers)

    async def post_binary(self, path: str, document: Any, tail: bytes, headers: dict[str, str] | None = None) -> Answer:
        head = json.dumps(document).encode()
        return await self.post(path, head + tail, {"Inference-Header-Content-Length": str(len(head))} | (headers or {}))
