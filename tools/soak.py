"""`make soak`: all kinds of traffic at once, for minutes, while hosts are killed and models come and go.

Two things are checked. Every request is answered exactly once: with the right value, or, where its model has just been
killed, unloaded or cancelled, with an error that says so. And nothing grows: every so often all traffic stops, and memory
and memory files (arenas are such), file descriptors, threads, processes, regions and waiting requests of the server and of
each host are looked at. The least of the last quarter of the time is compared with the least of the second: arenas, pools
of threads, caches, and the heap of each thread that has seen a large request, are made once, and what the heap holds
of free memory comes and goes; what leaks raises the least. Exits with 1 if anything of that is not so.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from rich.console import Console
from rich.table import Table
from tritonclient.utils import InferenceServerException, shared_memory

from naiad import examples
from naiad.examples.digits import as_png, holdout

PATIENCE_S = 60.0
#: How long after it was disturbed a model may answer with an error that says so.
AFTERMATH_S = 10.0
#: Of a model's host: a host that is killed again before it has run for a minute is given up at some point.
KILL_PAUSE_S = 75.0
CHECK_S = 30.0
EXPLAINED = re.compile(
    r"its host process|host process '|ended early|unknown model|is not ready|not available|was unloaded|has no available "
    r"versions|unloading|is not at ready state|must specify the START flag|failed to load|unavailable",
    re.IGNORECASE,
)
CANCELLED = re.compile("cancel", re.IGNORECASE)

SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.03)
        arrays = [pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + 1)]) for array in arrays]
"""
SLOW_CONFIG = """backend: "python" max_batch_size: 4
input [ { name: "VALUE" data_type: TYPE_FP32 dims: [ -1 ] } ] output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
dynamic_batching { }"""


class Wrong(Exception):
    """An answer that is not as it must be."""


@dataclass
class Tally:
    """What has become of the requests. From all threads."""

    right: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    texts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, counter: Counter[str], kind: str, number: int = 1) -> None:
        with self.lock:
            counter[kind] += number

    def explain(self, kind: str, text: str) -> None:
        with self.lock:
            self.explained[kind] += 1
            self.texts[re.sub(r"\d+", "N", text)[:110]] += 1

    def complain(self, kind: str, text: str) -> None:
        with self.lock:
            self.wrong[kind].append(f"{time.strftime('%H:%M:%S')} {text}")

    def total(self) -> int:
        with self.lock:
            return sum(sum(counter.values()) for counter in (self.right, self.explained, self.left))


class Disturbances:
    """When models were killed, loaded or unloaded."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def note(self, model: str, *, goes_on: bool = False) -> None:
        """It is disturbed now, or from now on: until the next note."""
        self._times[model] = math.inf if goes_on else time.monotonic()

    def explain(self, models: tuple[str, ...], begun: float) -> bool:
        return any(self._times.get(model, -1e9) > begun - AFTERMATH_S for model in models)


class Gate:
    """Lets all traffic go on or stop."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._changed = threading.Condition()
        self._inside = 0
        self.ended = False

    def __enter__(self) -> None:
        while True:
            self._open.wait()
            with self._changed:
                if self._open.is_set():
                    self._inside += 1
                    return

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def open(self) -> None:
        self._open.set()

    def close(self) -> bool:
        """Returns when nobody is inside; False if that does not come."""
        self._open.clear()
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, 3 * PATIENCE_S)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


# ---- the server and its processes -----------------------------------------------------------------------------


class Server:
    def __init__(self, repository: Path, log: Path) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        command = [str(Path(sys.executable).parent / "naiad"), "serve", f"--model-repository={repository}"]
        command += ["--model-control-mode=explicit", "--load-model=*"]
        for name, port in (("http", self.http_port), ("grpc", self.grpc_port), ("metrics", self.metrics_port)):
            command += [f"--{name}-port={port}", f"--{name}-address=127.0.0.1"]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def http(self) -> Any:
        return tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.http_port}", network_timeout=PATIENCE_S)

    def grpc(self) -> Any:
        return tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")

    def wait_ready(self) -> None:
        limit = time.monotonic() + 2 * PATIENCE_S
        while self.process.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(OSError), self.http() as client:
                if client.is_server_ready():
                    return
            time.sleep(0.1)
        raise SystemExit(f"the server did not start; its log:\n{self.log.read_text(errors='replace')}")

    def processes(self) -> dict[int, str]:
        """Process id -> name, of the server ("naiad"), the zygotes ("naiad-...") and the hosts ("naiad:...")."""
        children: dict[int, list[int]] = defaultdict(list)
        names = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit():
                    name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                    state, parent = rest.split()[:2]
                    if state != "Z":
                        names[int(entry.name)] = name
                        children[int(parent)].append(int(entry.name))
        found, todo = {}, [self.process.pid]
        while todo:
            pid = todo.pop()
            found[pid] = names.get(pid, "gone")
            todo += children[pid]
        return found

    def pending(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        lines = re.findall(r"^nv_inference_pending_request_count\{.*\} (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, lines)))

    def regions(self) -> int:
        with self.http() as client:
            return len(client.get_system_shared_memory_status())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass(frozen=True)
class Use:
    """What a process has. Bytes of its own memory, not of that shared with its zygote; bytes of memory files that it has
    open; how many memory files and regions it has mapped.
    """

    memory: int
    files: int
    mappings: int
    descriptors: int
    threads: int

    def __add__(self, other: "Use") -> "Use":
        mine, its = vars(self).values(), vars(other).values()
        return Use(*(a + b for a, b in zip(mine, its, strict=True)))

    def __and__(self, other: "Use") -> "Use":
        """The less of both, one by one."""
        mine, its = vars(self).values(), vars(other).values()
        return Use(*map(min, mine, its))


def use_of(pid: int) -> Use:
    root = Path("/proc", str(pid))
    private = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", (root / "smaps_rollup").read_text(), re.MULTILINE)
    descriptors, files = 0, {}
    for descriptor in (root / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("/memfd:"):
                status = descriptor.stat()
                files[status.st_ino] = status.st_blocks * 512
            descriptors += 1
    shared = re.findall("/memfd:|/dev/shm/", (root / "maps").read_text())
    threads = len(list((root / "task").iterdir()))
    return Use(1024 * sum(map(int, private)), sum(files.values()), len(shared), descriptors, threads)


def uses(server: Server) -> dict[str, Use]:
    found: dict[str, Use] = {}
    for pid, name in server.processes().items():
        with contextlib.suppress(OSError):
            use = use_of(pid)
            found[name] = found[name] + use if name in found else use
    return found


# ---- traffic --------------------------------------------------------------------------------------------------


class Traffic:
    """One client on one thread, with connections of its own; each method is an exchange and says what came of it."""

    _sequences = itertools.count(1)

    def __init__(self, server: Server, tally: Tally, disturbances: Disturbances, seed: int) -> None:
        self.server = server
        self.tally = tally
        self.disturbances = disturbances
        self.random = random.Random(seed)
        self.images, self.labels = DIGITS
        self.queues: list[Queue[Any]] = []
        self.http = server.http()
        self.grpc = server.grpc()

    def run(self, exchange: Callable[["Traffic"], None], gate: Gate) -> None:
        while not gate.ended:
            with gate:
                if gate.ended:
                    return
                try:
                    exchange(self)
                except Exception:
                    self.tally.complain(exchange.__name__, traceback.format_exc(limit=-3))
                    self.http, self.grpc = self.server.http(), self.server.grpc()

    def late(self) -> int:
        """Answers beyond those that were waited for."""
        queues, self.queues = self.queues, []
        return sum(queue.qsize() for queue in queues)

    def either(self) -> tuple[Any, Any]:
        return self.random.choice([(tritonclient.http, self.http), (tritonclient.grpc, self.grpc)])

    def some_images(self) -> tuple[Any, Any]:
        chosen = [self.random.randrange(len(self.images)) for _ in range(self.random.randint(1, 8))]
        return self.images[chosen].reshape(-1, 64), self.labels[chosen]

    def judge(self, kind: str, models: tuple[str, ...], begun: float, error: Exception) -> None:
        """An error in place of an answer: explained, or wrong."""
        text = str(error)
        known = isinstance(error, InferenceServerException) and EXPLAINED.search(text)
        if known and self.disturbances.explain(models, begun):
            self.tally.explain(kind, text)
        else:
            self.tally.complain(kind, f"{type(error).__name__}: {text}")

    def check(self, kind: str, models: tuple[str, ...], call: Callable[[], Any], right: Callable[[Any], bool]) -> bool:
        begun = time.monotonic()
        try:
            result = call()
        except InferenceServerException as error:
            self.judge(kind, models, begun, error)
            return False
        if right(result):
            self.tally.count(self.tally.right, kind)
            return True
        self.tally.complain(kind, f"a wrong answer of {models[0]}: {result.get_response()}")
        return False

    # Each of these is one exchange.

    def infer(self, model: str = "digits", kind: str = "infer") -> None:
        library, client = self.either()
        images, labels = self.some_images()
        inputs = [tensor(library, "IMAGE", images)]
        self.check(
            kind,
            (model,),
            lambda: client.infer(model, inputs),
            lambda result: bool((result.as_numpy("LABEL")[:, 0] == labels).all()),
        )

    def visitor(self) -> None:
        self.infer("visitor", "load and unload")

    def many_at_once(self) -> None:
        queue: Queue[Any] = Queue()
        self.queues.append(queue)
        begun = time.monotonic()
        sent = {}
        for number in range(self.random.randint(4, 24)):
            images, sent[number] = self.some_images()
            self.grpc.async_infer(
                "digits",
                [tensor(tritonclient.grpc, "IMAGE", images)],
                callback=lambda result, error, number=number: queue.put((number, result, error)),
            )
        while sent:
            number, result, error = queue.get(timeout=PATIENCE_S)
            labels = sent.pop(number)
            if error is not None:
                self.judge("async", ("digits",), begun, error)
            elif (result.as_numpy("LABEL")[:, 0] == labels).all():
                self.tally.count(self.tally.right, "async")
            else:
                self.tally.complain("async", f"a wrong answer: {result.get_response()}")

    def ensemble(self) -> None:
        library, client = self.either()
        chosen = [self.random.randrange(len(self.images)) for _ in range(self.random.randint(1, 3))]
        files = np.array([[as_png(self.images[index])] for index in chosen], object)
        models = ("digits_from_png", "digits_png", "digits")
        if self.random.random() < 0.2:
            files[0, 0] = b"no picture"
            begun = time.monotonic()
            try:
                result = client.infer(models[0], [tensor(library, "PNG", files)])
            except InferenceServerException as error:
                if "not a PNG file" in str(error):
                    self.tally.count(self.tally.right, "ensemble")
                else:
                    self.judge("ensemble", models, begun, error)
            else:
                self.tally.complain("ensemble", f"an answer to what is no picture: {result.get_response()}")
            return
        self.check(
            "ensemble",
            models,
            lambda: client.infer(models[0], [tensor(library, "PNG", files)]),
            lambda result: bool((result.as_numpy("LABEL")[:, 0] == PNG_LABELS[chosen]).all()),
        )

    def cascade(self) -> None:
        library, client = self.either()
        chosen = [self.random.randrange(len(self.images)) for _ in range(self.random.randint(1, 8))]
        images = self.images[chosen].reshape(-1, 64)
        self.check(
            "BLS",
            ("digits_cascade", "digits_linear", "digits"),
            lambda: client.infer("digits_cascade", [tensor(library, "IMAGE", images)]),
            lambda result: all(
                model == b"digits_linear" or label == self.labels[index]
                for index, label, model in zip(
                    chosen, result.as_numpy("LABEL")[:, 0], result.as_numpy("MODEL")[:, 0], strict=True
                )
            ),
        )

    def sequence(self) -> None:
        library, client = self.either()
        key, total = next(self._sequences), 0.0
        length = self.random.randint(1, 12)
        for step in range(length):
            value = self.random.randint(-9, 9)
            total += value
            inputs = [tensor(library, "VALUE", np.array([[value]], np.float32))]
            flags = {"sequence_id": key, "sequence_start": step == 0, "sequence_end": step == length - 1}
            call = lambda inputs=inputs, flags=flags: client.infer("running_sum", inputs, **flags)  # noqa: E731
            right = lambda result, total=total: result.as_numpy("SUM").item() == total  # noqa: E731
            if not self.check("sequence", ("running_sum",), call, right):
                return

    def stream(self) -> None:
        """Several requests on one stream: the words of each, in order, then one that says it is the last."""
        queue: Queue[Any] = Queue()
        self.queues.append(queue)
        begun = time.monotonic()
        expected: dict[str, list[str]] = {}
        with self.server.grpc() as client:
            client.start_stream(lambda result, error: queue.put((result, error)))
            for number in range(self.random.randint(1, 6)):
                text = [f"{number}-{word}" for word in range(self.random.randint(0, 8))]
                expected[str(number)] = text
                inputs = [tensor(tritonclient.grpc, "text_input", np.array([" ".join(text).encode()], object))]
                client.async_stream_infer("words", inputs, request_id=str(number), enable_empty_final_response=True)
            spoken = defaultdict(list)
            try:
                while expected:
                    result, error = queue.get(timeout=PATIENCE_S)
                    if error is not None:
                        # Which of the requests has failed is not in the error of a stream; the rest still come.
                        self.judge("stream", ("words",), begun, error)
                        if not self.disturbances.explain(("words",), begun):
                            return
                        with contextlib.suppress(Empty):
                            while True:
                                queue.get(timeout=2)
                        return
                    response = result.get_response()
                    if (word := result.as_numpy("text_output")) is not None:
                        spoken[response.id].append(word.item().decode())
                    if response.parameters["triton_final_response"].bool_param:
                        text = expected.pop(response.id)
                        if spoken[response.id] != text:
                            raise Wrong(f"said {spoken[response.id]} for {text}")
                        self.tally.count(self.tally.right, "stream")
            finally:
                client.stop_stream()

    def generate(self) -> None:
        text = [f"word{number}" for number in range(self.random.randint(1, 6))]
        begun = time.monotonic()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.server.http_port}/v2/models/words/generate_stream",
            f'{{"text_input": "{" ".join(text)}"}}'.encode(),
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                body = answer.read().decode()
        except urllib.error.HTTPError as error:
            self.judge("generate", ("words",), begun, InferenceServerException(error.read().decode()))
            return
        if '"error"' in body:
            self.judge("generate", ("words",), begun, InferenceServerException(body))
        elif re.findall(r'"text_output":\s*"(\w+)"', body) == text:
            self.tally.count(self.tally.right, "generate")
        else:
            self.tally.complain("generate", f"{body!r} for {text}")

    def cancel(self) -> None:
        queue: Queue[Any] = Queue()
        self.queues.append(queue)
        begun = time.monotonic()
        value = np.full((1, self.random.choice([1, 1000, 200_000])), self.random.random(), np.float32)
        call = self.grpc.async_infer(
            "slow",
            [tensor(tritonclient.grpc, "VALUE", value)],
            callback=lambda result, error: queue.put((result, error)),
        )
        time.sleep(self.random.random() * 0.06)
        call.cancel()
        result, error = queue.get(timeout=PATIENCE_S)
        if error is None:
            if not (result.as_numpy("OUT") == value + 1).all():
                raise Wrong("a wrong answer of slow")
            self.tally.count(self.tally.right, "cancel")
        elif CANCELLED.search(str(error)):
            self.tally.count(self.tally.left, "cancel")
        else:
            self.judge("cancel", ("slow",), begun, error)

    def leave_stream(self) -> None:
        """Goes away in the middle of a stream."""
        queue: Queue[Any] = Queue()
        with self.server.grpc() as client:
            client.start_stream(lambda result, error: queue.put((result, error)))
            inputs = [tensor(tritonclient.grpc, "text_input", np.array([b"a b c d e f g h i j"], object))]
            client.async_stream_infer("slow_words", inputs)
            with contextlib.suppress(Empty):
                queue.get(timeout=self.random.random())
            client.stop_stream(cancel_requests=True)
        self.tally.count(self.tally.left, "disconnect")

    def hang_up(self) -> None:
        """Closes the connection in the middle of a request, while it runs, or in the middle of an answer."""
        if self.random.random() < 0.5:
            values = ", ".join(["1.5"] * self.random.choice([1, 20_000]))
            count = values.count(",") + 1
            path, body = (
                "slow/infer",
                (f'{{"inputs": [{{"name": "VALUE", "datatype": "FP32", "shape": [1, {count}], "data": [{values}]}}]}}'),
            )
        else:
            path, body = "slow_words/generate_stream", '{"text_input": "one two three four five"}'
        head = f"POST /v2/models/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        data = (head + body).encode()
        with socket.create_connection(("127.0.0.1", self.server.http_port), timeout=PATIENCE_S) as connection:
            if self.random.random() < 0.5:
                # The end comes as a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(data if self.random.random() < 0.7 else data[: self.random.randrange(len(data))])
            if self.random.random() < 0.3:
                connection.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    connection.recv(64)
            time.sleep(self.random.random() * 0.05)
        self.tally.count(self.tally.left, "disconnect")

    def region(self) -> None:
        """Images in, labels out through memory that is shared with the server."""
        library, client = self.either()
        name = f"soak-{uuid.uuid4().hex}"
        images, labels = self.some_images()
        size = images.nbytes + 8 * len(labels)
        handle = shared_memory.create_shared_memory_region(name, f"/{name}", size)
        try:
            shared_memory.set_shared_memory_region(handle, [images])
            client.register_system_shared_memory(name, f"/{name}", size)
            given = library.InferInput("IMAGE", list(images.shape), "FP32")
            given.set_shared_memory(name, images.nbytes)
            wanted = library.InferRequestedOutput("LABEL")
            wanted.set_shared_memory(name, 8 * len(labels), images.nbytes)

            def right(result: Any) -> bool:
                found = shared_memory.get_contents_as_numpy(handle, np.int64, [len(labels)], images.nbytes)
                return bool((found == labels).all())

            self.check("region", ("digits",), lambda: client.infer("digits", [given], outputs=[wanted]), right)
            client.unregister_system_shared_memory(name)
        finally:
            shared_memory.destroy_shared_memory_region(handle)


def tensor(library: Any, name: str, array: Any) -> Any:
    made = library.InferInput(name, list(array.shape), "BYTES" if array.dtype == object else "FP32")
    made.set_data_from_numpy(array)
    return made


def predicted(images: Any) -> Any:
    """What `digits` answers, computed here."""
    weights = np.load(Path(examples.__file__).parent / "weights.npz")
    hidden = np.maximum(images.reshape(-1, 64) / 16 @ weights["w1"] + weights["b1"], 0)
    scores = hidden @ weights["w2"] + weights["b2"]
    return scores.argmax(axis=1), np.diff(np.sort(scores, axis=1)[:, -2:])[:, 0]


def certain_digits() -> tuple[Any, Any]:
    """Images, and what `digits` answers. Without the few where two digits are so close that rounding could decide."""
    images, _ = holdout()
    labels, margins = predicted(images)
    certain = margins > 0.5
    return images[certain], labels[certain]


DIGITS = certain_digits()
PNG_LABELS = predicted(np.rint(DIGITS[0] * (255 / 16)) * 16 / 255)[0]
#: Exchange -> how many threads repeat it.
EXCHANGES: dict[Callable[[Traffic], None], int] = {
    Traffic.infer: 2,
    Traffic.many_at_once: 1,
    Traffic.ensemble: 1,
    Traffic.cascade: 1,
    Traffic.sequence: 3,
    Traffic.stream: 1,
    Traffic.generate: 1,
    Traffic.cancel: 1,
    Traffic.leave_stream: 1,
    Traffic.hang_up: 1,
    Traffic.region: 1,
    Traffic.visitor: 1,
}


# ---- what goes wrong on purpose -------------------------------------------------------------------------------


class Havoc:
    """Kills hosts, loads and unloads. On a thread of its own, while the gate is open."""

    def __init__(self, server: Server, tally: Tally, disturbances: Disturbances) -> None:
        self._server = server
        self._tally = tally
        self._disturbances = disturbances
        self._killed_at: dict[str, float] = {}
        self._turns = itertools.count()

    def turn(self) -> None:
        turn = next(self._turns)
        with self._server.http() as client:
            if turn % 2 == 0:
                self._visit(client)
            if turn % 4 == 1:
                # The same model with another configuration: the new one takes over, and no request is lost.
                config = client.get_model_config("digits")
                config["dynamic_batching"] = {"max_queue_delay_microseconds": turn % 3 * 100}
                self._do("reload", lambda: client.load_model("digits", config=json.dumps(config)))
            if turn % 4 == 3:
                self._kill()

    def _visit(self, client: Any) -> None:
        # However long loading takes on a busy machine.
        self._disturbances.note("visitor", goes_on=True)
        self._do("load and unload", lambda: client.unload_model("visitor"))
        time.sleep(0.2)
        self._do("load and unload", lambda: client.load_model("visitor"))
        self._disturbances.note("visitor")

    def _do(self, kind: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._tally.complain(kind, f"{type(error).__name__}: {error}")
        else:
            self._tally.count(self._tally.right, kind)

    def _kill(self) -> None:
        now = time.monotonic()
        hosts = [(pid, name) for pid, name in self._server.processes().items() if name.startswith("naiad:")]
        ripe = [(pid, name) for pid, name in hosts if now - self._killed_at.get(name, -1e9) > KILL_PAUSE_S]
        if not ripe:
            return
        # Each in turn.
        pid, name = min(ripe, key=lambda host: self._killed_at.get(host[1], -1e9))
        self._killed_at[name] = now
        for model in MODELS:
            if f"naiad:{model}"[:15] == name:  # what the kernel keeps of it
                self._disturbances.note(model)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._tally.count(self._tally.right, "kill -9")


MODELS = (*examples.MODELS, "slow", "slow_words", "visitor")


def write_models(repository: Path) -> None:
    examples.write_example(repository)
    shutil.copytree(repository / "digits", repository / "visitor")
    shutil.copytree(repository / "words", repository / "slow_words")
    config = repository / "slow_words" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "0"', 'string_value: "20"'))
    (repository / "slow" / "1").mkdir(parents=True)
    (repository / "slow" / "1" / "model.py").write_text(SLOW)
    (repository / "slow" / "config.pbtxt").write_text(SLOW_CONFIG)


# ---- growth ---------------------------------------------------------------------------------------------------


def settled(server: Server, count: int | None) -> list[str]:
    """Waits until nothing is under way; what then still is."""
    limit = time.monotonic() + 20
    while True:
        left = []
        if pending := server.pending():
            left.append(f"{pending} requests wait, and nobody for them")
        if regions := server.regions():
            left.append(f"{regions} regions are registered that were unregistered")
        processes = server.processes()
        if count is not None and len(processes) != count:
            left.append(f"{len(processes)} processes in place of {count}: {sorted(processes.values())}")
        if not left or time.monotonic() > limit:
            return left
        time.sleep(0.2)


def quarters(rounds: list[dict[str, Use]]) -> tuple[dict[str, Use], dict[str, Use]]:
    """The least of each process in the second quarter and in the last; `rounds` are those of all the time."""
    length = max(1, len(rounds) // 4)
    return least(rounds[length : 2 * length] or rounds), least(rounds[-length:])


def least(rounds: list[dict[str, Use]]) -> dict[str, Use]:
    found: dict[str, Use] = {}
    for uses in rounds:
        for name, use in uses.items():
            found[name] = found[name] & use if name in found else use
    return found


def growth(before: dict[str, Use], now: dict[str, Use]) -> Iterator[str]:
    """What has grown, by more than what comes and goes."""
    if before.keys() != now.keys():
        yield f"other processes: {sorted(now)} in place of {sorted(before)}"
    for name in before.keys() & now.keys():
        was, it = before[name], now[name]
        if it.memory > was.memory * 1.05 + (4 << 20):
            yield f"{name}: memory from {was.memory >> 20} to {it.memory >> 20} MiB"
        if it.files > was.files * 1.5 + (8 << 20):
            yield f"{name}: memory files from {was.files >> 20} to {it.files >> 20} MiB"
        if it.mappings > was.mappings + 4:
            yield f"{name}: mapped memory files and regions from {was.mappings} to {it.mappings}"
        if it.descriptors > was.descriptors + 8:
            yield f"{name}: file descriptors from {was.descriptors} to {it.descriptors}"
        if it.threads > was.threads + 4:
            yield f"{name}: threads from {was.threads} to {it.threads}"


def table_of(before: dict[str, Use], now: dict[str, Use]) -> Table:
    table = Table("process", "memory MiB", "memory files MiB", "mapped", "descriptors", "threads")
    for name in sorted(now):
        was, it = before.get(name, Use(0, 0, 0, 0, 0)), now[name]
        table.add_row(
            name,
            f"{was.memory / 2**20:.1f} -> {it.memory / 2**20:.1f}",
            f"{was.files / 2**20:.1f} -> {it.files / 2**20:.1f}",
            f"{was.mappings} -> {it.mappings}",
            f"{was.descriptors} -> {it.descriptors}",
            f"{was.threads} -> {it.threads}",
        )
    return table


def tally_table(tally: Tally) -> Table:
    table = Table("traffic", "right", "explained error", "left by the client", "wrong")
    for kind in sorted({*tally.right, *tally.explained, *tally.left, *tally.wrong}):
        wrong = len(tally.wrong.get(kind, ()))
        table.add_row(
            kind, f"{tally.right[kind]:,}", f"{tally.explained[kind]:,}", f"{tally.left[kind]:,}", f"{wrong:,}"
        )
    return table


def soak(server: Server, minutes: float, console: Console) -> list[str]:
    """Runs it; what is wrong."""
    tally, disturbances, gate = Tally(), Disturbances(), Gate()
    havoc = Havoc(server, tally, disturbances)
    seeds = itertools.count(1)
    traffics, threads = [], []
    for exchange, count in EXCHANGES.items():
        for _ in range(count):
            traffics.append(Traffic(server, tally, disturbances, next(seeds)))
            threads.append(threading.Thread(target=traffics[-1].run, args=(exchange, gate), daemon=True))
    for thread in threads:
        thread.start()
    count = len(server.processes())
    begun = time.monotonic()
    end = begun + 60 * minutes
    problems: list[str] = []
    rounds: list[dict[str, Use]] = []
    round_s = min(CHECK_S, 15 * minutes)
    while True:
        gate.open()
        until = min(end, time.monotonic() + round_s)
        while time.monotonic() < until and server.process.poll() is None:
            time.sleep(1)
            havoc.turn()
        if not gate.close():
            problems.append("some exchanges did not end")
            break
        if server.process.poll() is not None:
            problems.append(f"the server has ended with {server.process.returncode}")
            break
        problems += settled(server, count)
        if late := sum(traffic.late() for traffic in traffics):
            problems.append(f"{late} answers to requests that were answered already")
        now = uses(server)
        rounds.append(now)
        whole = sum(use.memory for use in now.values()) >> 20
        wrong = sum(map(len, tally.wrong.values()))
        console.print(
            f"{(time.monotonic() - begun) / 60:5.1f} min  {tally.total():9,} requests  {wrong} wrong  {whole} MiB in "
            f"{len(now)} kinds of processes, server {now['naiad'].memory >> 20} MiB, "
            f"{now['naiad'].descriptors} descriptors, {now['naiad'].threads} threads"
        )
        if time.monotonic() >= end:
            break
    gate.ended = True
    gate.open()
    console.print(tally_table(tally))
    before, last = quarters(rounds)
    console.print(table_of(before, last))
    for text, times in tally.texts.most_common(20):
        console.print(f"{times:7,} x {text}", markup=False, soft_wrap=True)
    problems += growth(before, last)
    for kind, texts in tally.wrong.items():
        problems.append(f"{kind}: {len(texts)} wrong. The first:\n" + "\n".join(texts[:5]))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--log", type=Path, help="where the server's log goes; by default a temporary file")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=120)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder) / "models")
        log = arguments.log or Path(folder) / "server.log"
        server = Server(Path(folder) / "models", log)
        try:
            server.wait_ready()
            problems = soak(server, arguments.minutes, console)
        finally:
            status = server.stop()
        if status != 0:
            problems.append(f"the server's exit status is {status}")
        text = log.read_text(errors="replace")
        problems += [
            f"in the log: {text[max(0, it.start() - 200) : it.end() + 1500]}"
            for it in re.finditer("Traceback|This is a bug", text)
        ][:3]
    for problem in problems:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    console.print("all right" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
