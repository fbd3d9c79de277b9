"""Ray Serve: one replica, requests batched for up to a millisecond, on a cluster of this machine alone."""

import os
import signal
from typing import Any

import ray
from model import HTTP_PORT, MAX_BATCH_SIZE, decode_http, encode_http, load, run_batch
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
class Model:
    def __init__(self) -> None:
        self.run = load()

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=0.001)
    async def infer(self, requests: list[Any]) -> list[Any]:
        return run_batch(self.run, requests)

    async def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            return Response()
        content_type = request.headers["content-type"]
        outputs = await self.infer(decode_http(content_type, await request.body()))
        return Response(encode_http(content_type, outputs), media_type=content_type)


os.environ["RAY_AUTH_MODE"] = "disabled"  # else it leaves a token in the home folder
variables = {name: value for name, value in os.environ.items() if name.startswith("BENCH_")}
variables["PYTHONPATH"] = os.path.dirname(__file__)
ray.init(
    num_cpus=2,
    include_dashboard=False,
    object_store_memory=200_000_000,
    log_to_driver=False,
    runtime_env={"env_vars": variables},
)
serve.start(http_options={"host": "0.0.0.0", "port": HTTP_PORT})
serve.run(Model.bind())
signal.sigwait({signal.SIGTERM, signal.SIGINT})
serve.shutdown()
ray.shutdown()
