"""MLServer: HTTP and gRPC of the V2 protocol; the model in a process of its own, requests batched for up to a millisecond."""

import json
import os
import sys
import tempfile
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse
from model import MAX_BATCH_SIZE, NAME, load


class Model(MLModel):
    async def load(self) -> bool:
        self.run = load()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        outputs = []
        for name, array in self.run(inputs).items():
            codec = StringCodec if array.dtype == object else NumpyCodec
            outputs.append(codec.encode_output(name, array))
        return InferenceResponse(model_name=self.name, outputs=outputs)


def settings() -> dict[str, dict[str, object]]:
    server = {"http_port": "HTTP", "grpc_port": "GRPC", "metrics_port": "METRICS"}
    ports = {name: int(os.environ[f"BENCH_{variable}_PORT"]) for name, variable in server.items()}
    model = {
        "name": NAME,
        "implementation": "mlserver_app.Model",
        "max_batch_size": MAX_BATCH_SIZE,
        "max_batch_time": 0.001,
    }
    return {"settings.json": {**ports, "parallel_workers": 1, "debug": False}, "model-settings.json": model}


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)  # where it leaves what it counts
    for name, document in settings().items():
        (folder / name).write_text(json.dumps(document))
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    program = str(Path(sys.executable).parent / "mlserver")
    os.execv(program, [program, "start", str(folder)])
