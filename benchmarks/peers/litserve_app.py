"""LitServe: a process for the model, requests batched for up to a millisecond. JSON only: it reads nothing else."""

from typing import Any

import litserve
from fastapi import Response
from model import HTTP_PORT, MAX_BATCH_SIZE, decode, encode, load, run_batch


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.run = load()

    def decode_request(self, request):  # its type would tell LitServe to let pydantic read it
        return decode(request)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: list[Any]) -> list[Any]:
        return run_batch(self.run, inputs)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Response:
        return Response(encode(output), media_type="application/json")


if __name__ == "__main__":
    api = Api(max_batch_size=MAX_BATCH_SIZE, batch_timeout=0.001, api_path="/infer")
    server = litserve.LitServer(api, accelerator="cpu", timeout=False)
    server.run(port=HTTP_PORT, generate_client_file=False, log_level="warning")
