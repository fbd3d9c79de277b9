"""BentoML: one worker. JSON only, and not batched: its batches are of one array, not of named ones."""

import os
import sys
from typing import Any

import bentoml
import orjson
from model import decode, encode, load


@bentoml.service(workers=1, traffic={"timeout": 60})
class Model:
    def __init__(self) -> None:
        self.run = load()

    @bentoml.api(route="/infer")
    def infer(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(encode(self.run(decode({"inputs": inputs}))))
        return found


if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, "-m", "bentoml", "serve", "bentoml_app:Model", "--working-dir", folder]
    os.execv(sys.executable, [*command, "--port", os.environ["BENCH_HTTP_PORT"]])
