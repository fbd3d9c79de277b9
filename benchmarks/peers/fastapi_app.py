"""Bare FastAPI on uvicorn: no batching, no queue, the model called where the request arrives."""

import fastapi
import uvicorn
from model import HTTP_PORT, decode_http, encode_http, load

app = fastapi.FastAPI()
run = load()


@app.get("/ready")
async def ready() -> None:
    pass


@app.post("/infer")
async def infer(request: fastapi.Request) -> fastapi.Response:
    content_type = request.headers["content-type"]
    outputs = run(decode_http(content_type, await request.body()))
    return fastapi.Response(encode_http(content_type, outputs), media_type=content_type)


uvicorn.run(app, port=HTTP_PORT, log_level="warning", access_log=False)
