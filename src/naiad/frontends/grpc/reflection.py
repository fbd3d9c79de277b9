"""gRPC server reflection, by gRPC's own package. Lives on the event loop."""

import importlib
import importlib.util
from typing import Any, Final

from naiad.errors import Internal, InvalidArgument, NaiadError
from naiad.frontends.grpc.calls import fail
from naiad.frontends.grpc.compression import decompress
from naiad.frontends.grpc.head import OK_TRAILERS
from naiad.frontends.grpc.stream import Message, Receiver, Stream

PATH: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Reflection:
    """Says what `services` there are. Raises InvalidArgument where the package is missing."""

    def __init__(self, *services: str) -> None:
        if importlib.util.find_spec("grpc_reflection") is None:
            raise InvalidArgument(
                "gRPC reflection needs the package grpcio-reflection: pip install 'naiad[reflection]'"
            )
        module = importlib.import_module("grpc_reflection.v1alpha.reflection")
        self._messages = importlib.import_module("grpc_reflection.v1alpha.reflection_pb2")
        self._servicer = module.ReflectionServicer((*services, module.SERVICE_NAME))

    def answers(self, data: Message) -> list[bytes]:
        """The answers to a ServerReflectionRequest. Raises Internal for bytes that are none."""
        try:
            request = self._messages.ServerReflectionRequest.FromString(bytes(data))
        except Exception as error:  # protobuf's DecodeError, whose class differs between its implementations
            raise Internal("Unable to parse request") from error
        responses: Any = self._servicer.ServerReflectionInfo(iter([request]), None)
        return [response.SerializeToString() for response in responses]


class ReflectionStream(Receiver):
    """One stream of questions, each answered when it comes."""

    def __init__(self, reflection: Reflection, stream: Stream) -> None:
        self._reflection = reflection
        self._stream = stream

    def received(self, message: Message, is_compressed: bool) -> None:
        stream = self._stream
        try:
            plain = decompress(message, stream.head.encoding) if is_compressed else message
            for answer in self._reflection.answers(plain):
                stream.send(answer)
        except NaiadError as error:
            fail(stream, error)

    def ended(self) -> None:
        self._stream.finish(OK_TRAILERS)

    def left(self) -> None:
        pass
