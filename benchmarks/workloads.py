"""What is measured: a table of workloads, each with its models, its tensors, its load and the servers that can run it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks import lifecycle, load
from benchmarks.bodies import Arrays, difference
from benchmarks.load import RESPONSES, Measurement, Task
from benchmarks.models import MANY
from benchmarks.servers import PEERS, V2_PEERS, Running

BOTH = ("triton", "naiad")
#: Triton as it comes from PyPI runs Python models only.
NO_TRITON = ("naiad", *PEERS)
Tensors = Callable[[], Arrays]
#: What is right to answer, from the inputs and the model's folder.
Expected = Callable[[Arrays, Path], Arrays]


def numbers(count: int) -> Tensors:
    return lambda: {"INPUT0": np.random.default_rng(0).random((1, count), dtype=np.float32)}


def sixteen() -> Arrays:
    return numbers(16)()


def image() -> Arrays:
    return {"INPUT0": np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)}


def pair() -> Arrays:
    random = np.random.default_rng(0)
    return {name: random.random((1, 16), dtype=np.float32) for name in ("INPUT0", "INPUT1")}


def strings() -> Arrays:
    return {"INPUT0": np.array([[f"string number {index}".encode() for index in range(10_000)]], np.object_)}


def one_integer(value: int) -> Tensors:
    return lambda: {"INPUT0": np.array([[value]], np.int32)}


def same(inputs: Arrays, model: Path) -> Arrays:
    return {"OUTPUT0": inputs["INPUT0"]}


def plus_three(inputs: Arrays, model: Path) -> Arrays:
    return {"OUTPUT0": inputs["INPUT0"] + 3}


def last_response(inputs: Arrays, model: Path) -> Arrays:
    return {"OUTPUT0": inputs["INPUT0"] - 1}


def computed(inputs: Arrays, model: Path) -> Arrays:
    """What ONNX Runtime itself says."""
    session = onnxruntime.InferenceSession(str(model / "1" / "model.onnx"))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@dataclass(frozen=True)
class Workload:
    """The first of `models` is asked. `levels` are requests in flight or, where `measure` says so, something else.

    `unit` tells which way is better: of what ends in /s more is, of everything else less.
    """

    name: str
    models: tuple[str, ...]
    servers: tuple[str, ...]
    inputs: Tensors = sixteen
    expected: Expected = same
    form: str = "binary"
    levels: tuple[int, ...] = (1, 16, 64, 256)
    measure: Callable[[Task], Measurement] = load.closed_loop
    unit: str = "requests/s"
    flags: tuple[str, ...] = ()
    #: How many times as long as others it warms up and is measured, where an answer takes long.
    stretch: int = 1
    #: Parameters of the request that is checked; None where `measure` checks the answers itself.
    checked: dict[str, int | bool] | None = field(default_factory=dict)
    #: The framework whose loop is measured beside the servers.
    direct: str = ""

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")

    def check(self, running: Running, inputs: Arrays, expected: Arrays) -> None:
        """One request, whose answer has to be right. Raises RuntimeError where it is not."""
        if self.checked is None:
            return
        wrong = difference(running.ask(self.form, inputs, expected, self.checked), expected)
        if wrong:
            raise RuntimeError(f"{running.server.name}, {self.name}: {wrong}")

    def loop(self, repository: Path, cores: list[int], seconds: int, batch: int) -> Measurement:
        """Calls the framework in a loop with so many images at once, on the cores of the servers."""
        folder = repository / self.models[0] / "1"
        command = [sys.executable, "-m", "benchmarks.direct", self.direct, str(folder)]
        command += [str(seconds), str(len(cores)), str(batch)]
        pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
        return Measurement(**json.loads(subprocess.check_output(pinned, text=True).splitlines()[-1]))


def _identity() -> list[Workload]:
    small = partial(Workload, models=("identity",))
    large = partial(small, inputs=numbers(3 * 224 * 224))
    return [
        small("HTTP JSON, 16 floats", servers=BOTH + PEERS, form="json"),
        small("HTTP binary, 16 floats", servers=BOTH),
        small("gRPC, 16 floats", servers=BOTH + V2_PEERS, form="grpc", levels=(1, 16, 32, 64, 128, 256)),
        large("HTTP binary, 602 kB", servers=BOTH + PEERS),
        large("gRPC, 602 kB", servers=BOTH + V2_PEERS, form="grpc"),
    ]


def _fixed_rates() -> list[Workload]:
    fixed = partial(Workload, models=("identity",), servers=BOTH, measure=load.open_loop, levels=(1000, 4000))
    return [
        fixed("HTTP binary, 16 floats, requests/s given"),
        fixed("gRPC, 16 floats, requests/s given", form="grpc"),
    ]


def _json() -> list[Workload]:
    text = partial(Workload, servers=BOTH + PEERS, form="json", levels=(1, 16))
    return [
        text("HTTP JSON, 1 k numbers", ("identity",), inputs=numbers(1000)),
        text("HTTP JSON, 1 M numbers", ("identity",), inputs=numbers(1_000_000), levels=(1, 4), stretch=3),
        text("HTTP JSON, 10 k strings", ("identity_strings",), inputs=strings),
    ]


def _onnx() -> list[Workload]:
    small = partial(Workload, servers=NO_TRITON, expected=computed, form="json", levels=(1, 16, 64))
    images = partial(Workload, inputs=image, expected=computed, levels=(1, 4, 8), unit="images/s", stretch=3)
    return [
        small("ONNX add_sub, HTTP JSON", ("add_sub",), inputs=pair),
        small("ONNX MLP 784-256-10, HTTP JSON", ("mlp",), inputs=numbers(784)),
        images("ResNet-50, ONNX Runtime", ("resnet50",), servers=("loop", *NO_TRITON), direct="onnxruntime"),
        images("ResNet-50, OpenVINO", ("resnet50_openvino",), servers=("loop", "naiad"), direct="openvino"),
        images("ResNet-50, PyTorch", ("resnet50_torch",), servers=("loop", "naiad"), direct="torch"),
        images("ResNet-50, TensorFlow", ("resnet50_tensorflow",), servers=("loop", "naiad"), direct="tensorflow"),
    ]


def _scheduling() -> list[Workload]:
    both = partial(Workload, servers=BOTH, levels=(1, 16, 64))
    whole = {"sequence_id": 1_000, "sequence_start": True, "sequence_end": True}
    streams = partial(
        Workload,
        models=("repeat",),
        servers=BOTH,
        inputs=one_integer(RESPONSES),
        expected=last_response,
        form="grpc",
        levels=(1, 8),
        unit="responses/s",
        checked=None,
    )
    return [
        both("ensemble of three steps", ("ensemble", "step0", "step1", "step2"), expected=plus_three),
        both("BLS, three calls", ("three_calls", "increment"), expected=plus_three),
        streams("decoupled stream, tritonclient", measure=load.stream),
        streams("decoupled stream, h2load", measure=load.stream_h2load),
        Workload(
            "live sequences",
            ("accumulate",),
            BOTH,
            inputs=one_integer(7),
            form="json",
            levels=(64,),
            measure=load.sequences,
            checked=whole,
        ),
        Workload(
            "system shared memory, 6 MB",
            ("identity",),
            BOTH,
            inputs=numbers(1_500_000),
            levels=(1, 4, 16),
            measure=load.system_shared_memory,
            checked=None,
        ),
    ]


def _lifecycle() -> list[Workload]:
    def explicit(first: str) -> tuple[str, ...]:
        return ("--model-control-mode=explicit", f"--load-model={first}")

    onnx_models = tuple(f"onnx{index}" for index in range(MANY))
    python_models = tuple(f"python{index}" for index in range(MANY))
    onnx = partial(Workload, levels=(1,), form="json", inputs=pair, expected=computed)
    python = partial(Workload, levels=(1,), form="json", servers=BOTH)
    onnx_alone = partial(onnx, servers=("naiad",), flags=explicit("onnx0"))
    python_alone = partial(python, flags=explicit("python0"))
    return [
        onnx("ready with 1 ONNX model", onnx_models[:1], servers=NO_TRITON, measure=lifecycle.ready, unit="s"),
        python("ready with 1 Python model", python_models[:1], measure=lifecycle.ready, unit="s"),
        onnx(f"ready with {MANY} ONNX models", onnx_models, servers=("naiad",), measure=lifecycle.ready, unit="s"),
        python(f"ready with {MANY} Python models", python_models, measure=lifecycle.ready, unit="s"),
        onnx_alone("memory of an idle ONNX model", onnx_models, measure=lifecycle.memory, unit="MB"),
        python_alone("memory of an idle Python model", python_models, measure=lifecycle.memory, unit="MB"),
        onnx_alone("load an ONNX model", onnx_models[:1], measure=lifecycle.load, unit="ms"),
        python_alone("load a Python model", python_models[:1], measure=lifecycle.load, unit="ms"),
        onnx_alone("unload an ONNX model", onnx_models[:1], measure=lifecycle.unload, unit="ms"),
        python_alone("unload a Python model", python_models[:1], measure=lifecycle.unload, unit="ms"),
    ]


def _logging() -> list[Workload]:
    on_and_off = ("naiad-silent", "naiad-logging")
    return [Workload("metrics and access log, HTTP binary, 16 floats", ("identity",), on_and_off, levels=(1, 64))]


WORKLOADS = [*_identity(), *_fixed_rates(), *_json(), *_onnx(), *_scheduling(), *_lifecycle(), *_logging()]
