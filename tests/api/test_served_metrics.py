"""The metrics of a server that works: Triton's under /metrics, all of them under /metrics/all."""

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
from served import Gate, Repository, Server, error_of, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    repository = Repository(tmp_path / "models")
    repository.doer("doer")
    repository.echo("echo", config="max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 2 ] }")
    with Server(repository) as server:
        yield server.started()


def value(text: str, name: str, **labels: str) -> float:
    """The value of one series, in whatever order its labels are written."""
    lines = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    (found,) = (number for inside, number in lines if dict(re.findall(r'(\w+)="([^"]*)"', inside)) == labels)
    return float(found)


def all_of(server: Server) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[2]}/metrics/all", timeout=30) as answer:
        return str(answer.read().decode())


def test_a_model_that_asks_for_a_cache_the_server_does_not_have_shows_its_families(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "models")
    repository.echo("echo", config="response_cache { enable: true }")
    with Server(repository).started() as server:
        server.http.infer("echo", "IN", np.zeros(5, np.float32))
        text = all_of(server)
    for name in ("num_hits", "hit_duration", "num_misses", "miss_duration"):
        assert value(text, f"nv_cache_{name}_per_model", model="echo", version="1") == 0


def test_all_metrics(server: Server, tmp_path: Path) -> None:
    for _ in range(3):
        server.http.infer("echo", "IN", np.zeros((2, 5), np.float32))
    gate = Gate(tmp_path)
    held = server.ask(server.http.do, "doer", gate.do)
    gate.reached()
    waiting = server.ask(server.grpc.do, "doer")
    until(lambda: server.pending("doer") == 1, "the second request waits")
    model = {"model": "doer", "version": "1"}
    assert value(all_of(server), "naiad_requests_in_flight", **model) == 2
    gate.open()
    wait((held, waiting))
    text = all_of(server)
    assert value(text, "naiad_requests_in_flight", **model) == 0
    assert value(text, "naiad_batches_total", **model, reason="single") == 2
    assert value(text, "naiad_latency_seconds_count", **model, phase="request") == 2
    total = value(text, "naiad_latency_seconds_sum", **model, phase="request")
    parts = [value(text, "naiad_latency_seconds_sum", **model, phase=phase) for phase in ("queue", "compute")]
    assert sum(parts) == pytest.approx(total)
    echo = {"model": "echo", "version": "1"}
    assert value(text, "naiad_batches_total", **echo, reason="preferred size") == 3
    assert value(text, "naiad_batch_size_bucket", **echo, le="1") == 0
    assert value(text, "naiad_batch_size_bucket", **echo, le="2") == 3
    assert value(text, "naiad_batch_size_sum", **echo) == 6
    assert value(text, "naiad_host_memory_bytes", **echo) > 1 << 20
    assert value(text, "naiad_arena_bytes", **echo) == 256 << 20
    assert 0 < value(text, "naiad_arena_used_bytes", **echo) <= 128 << 20
    assert value(text, "nv_inference_request_success", **echo) == 3
    assert "naiad_" not in server.metrics()


def test_restarts_are_counted(server: Server) -> None:
    (pid,) = {int(server.http.do("doer", "result = os.getpid()"))}
    assert value(all_of(server), "naiad_host_restarts_total", model="doer", version="1") == 0
    os.kill(pid, signal.SIGKILL)
    until(lambda: value(all_of(server), "naiad_host_restarts_total", model="doer", version="1") == 1, "a restart")
    until(lambda: server.http.is_model_ready("doer"), "the model is back")
    assert error_of(server.http.do, "doer", "raise ValueError('x')")
