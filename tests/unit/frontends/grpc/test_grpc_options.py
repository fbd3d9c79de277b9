"""The status of each kind of error, TLS, compression and reflection."""

import asyncio
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio
from grpc_fake_engine import FakeEngine
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from naiad import errors
from naiad.errors import InvalidArgument, NaiadError
from naiad.frontends.grpc.errors import status
from naiad.frontends.grpc.options import GrpcOptions
from naiad.frontends.grpc.server import GrpcFrontend
from naiad.options import ServerOptions


def kinds() -> list[type[NaiadError]]:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NaiadError)]
    return [kind for kind in found if kind is not NaiadError]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_kind_of_error_has_the_status_of_its_triton_code(kind: type[NaiadError]) -> None:
    name = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}.get(kind.triton_code, kind.triton_code)
    assert status(kind("why")) == (StatusCode[name].value[0], "why")


def test_an_error_of_no_kind_is_unknown() -> None:
    assert status(errors.NaiadError("why")) == (StatusCode.UNKNOWN.value[0], "why")


def test_the_servers_defaults_are_the_front_ends() -> None:
    assert GrpcOptions.of(ServerOptions(model_repository=("/models",))) == GrpcOptions()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of localhost, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command + files, check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(certificate: tuple[Path, Path], mutual: bool) -> None:
    files, key = certificate
    options = GrpcOptions(
        address="localhost",
        port=0,
        use_ssl=not mutual,
        use_ssl_mutual=mutual,
        server_cert=str(files),
        server_key=str(key),
        root_cert=str(files) if mutual else "",
    )
    async with GrpcFrontend(FakeEngine(), options) as frontend:
        own = (key.read_bytes(), files.read_bytes()) if mutual else (None, None)
        credentials = grpc.ssl_channel_credentials(files.read_bytes(), *own)
        async with aio.secure_channel(f"localhost:{frontend.port}", credentials) as channel:
            stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        if mutual:
            strangers = grpc.ssl_channel_credentials(files.read_bytes())
            async with aio.secure_channel(f"localhost:{frontend.port}", strangers) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                with pytest.raises(aio.AioRpcError):
                    await stub.ServerLive(pb.ServerLiveRequest())


def test_files_for_tls_that_are_not_there() -> None:
    with pytest.raises(InvalidArgument, match="--grpc-server-key=/none cannot be read: No such file"):
        GrpcFrontend(FakeEngine(), GrpcOptions(port=0, use_ssl=True, server_key="/none"))


class CountingProxy:
    """Passes bytes on to a port of this machine and counts those that come back."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.answered_bytes = 0
        self.port = 0

    async def __aenter__(self) -> "CountingProxy":
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()

    async def _pass(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        back = asyncio.create_task(self._back(server, to_client))
        while data := await client.read(65536):
            to_server.write(data)
        to_server.close()
        await back

    async def _back(self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while data := await server.read(65536):
            self.answered_bytes += len(data)
            to_client.write(data)
        to_client.close()


@pytest.mark.parametrize(("level", "smaller"), [("none", False), ("high", True)])
async def test_compressed_responses(level: Any, smaller: bool) -> None:
    options = GrpcOptions(address="127.0.0.1", port=0, compression_level=level)
    async with (
        GrpcFrontend(FakeEngine(), options) as frontend,
        CountingProxy(frontend.port) as proxy,
        aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 25_000])
        request = pb.ModelInferRequest(model_name="identity", inputs=[tensor], raw_input_contents=[bytes(100_000)])
        answer = await stub.ModelInfer(request)
        assert answer.raw_output_contents[0] == bytes(100_000)
        assert (proxy.answered_bytes < 20_000) is smaller


async def test_reflection_names_the_package_it_needs() -> None:
    options = GrpcOptions(address="127.0.0.1", port=0, reflection=True)
    if importlib.util.find_spec("grpc_reflection") is None:
        with pytest.raises(InvalidArgument, match=r"pip install 'naiad\[reflection\]'"):
            GrpcFrontend(FakeEngine(), options)
        return
    async with (
        GrpcFrontend(FakeEngine(), options) as frontend,
        aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel,
    ):
        list_services = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        call = list_services(iter([b"\x3a\x00"]))
        assert b"inference.GRPCInferenceService" in await call.read()
