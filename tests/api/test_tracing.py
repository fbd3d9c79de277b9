"""Traces of a running server: Triton's files, and spans sent to a collector."""

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from served import Repository, Server, until

#: Calls the model `inner` as a part of this request, and apart from it.
CALLING = """
inner = pb_utils.InferenceRequest(
    model_name="inner", requested_output_names=["OUT"], trace=request.trace(),
    inputs=[pb_utils.Tensor("DO", np.array([b"result = 1"], dtype=object))])
inner.exec()
pb_utils.InferenceRequest(
    model_name="inner", requested_output_names=["OUT"],
    inputs=[pb_utils.Tensor("DO", np.array([b"result = 2"], dtype=object))]).exec()
result = request.trace().get_context() or "none"
"""


def models(repository: Repository) -> Repository:
    repository.doer("outer")
    repository.doer("inner")
    repository.ensemble("pair", "inner", "inner")
    return repository


def post(server: Server, path: str, document: Any, headers: dict[str, str] | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=60)
    try:
        connection.request("POST", path, json.dumps(document), headers or {})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()


def do(server: Server, model: str, text: str, headers: dict[str, str] | None = None, **more: Any) -> str:
    tensor = {"name": "DO", "datatype": "BYTES", "shape": [1], "data": [text]}
    answer = post(server, f"/v2/models/{model}/infer", {"inputs": [tensor], **more}, headers)
    return answer["outputs"][0]["data"][0]


def read(path: Path) -> dict[int, dict[str, Any]]:
    """id -> what the file says of the request; `names` are those of its timestamps, in order."""
    requests: dict[int, dict[str, Any]] = {}
    for entry in json.loads(path.read_text()):
        about = requests.setdefault(entry["id"], {"names": [], "tensors": []})
        if "timestamps" in entry:
            about["names"] += [stamp["name"] for stamp in entry["timestamps"]]
        elif "tensor" in entry:
            about["tensors"].append((entry["activity"], entry["tensor"]["name"], entry["tensor"]["data"]))
        else:
            about.update(entry)
    return requests


COMPUTED = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


def test_a_file_shows_requests_steps_and_calls_from_models(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    flags = (
        *("--trace-config=level=TIMESTAMPS", "--trace-config=rate=1"),
        f"--trace-config=triton,file={path}",
    )
    with Server(models(repository), flags=flags).started() as server:
        do(server, "inner", "result = 0", id="first")
        assert server.grpc.do("inner", "result = 0") == "0"
        do(server, "pair", "result = 'result = 5'")
        assert do(server, "outer", CALLING) == "none", "there is a context with OpenTelemetry only"
        server.signal(15)
        assert server.wait() == 0
    first, second, pair, step, next_step, outer, inner = read(path).values()
    assert (first["model_name"], first["model_version"], first["request_id"]) == ("inner", 1, "first")
    assert first["names"][:4] == ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START"]
    assert first["names"][4:8] == COMPUTED
    assert set(first["names"][8:]) == {"INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"}
    assert "request_id" not in second
    assert [name for name in second["names"] if name.startswith("GRPC")] == [
        *("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
    ]
    assert not set(COMPUTED) & set(pair["names"])
    assert [one["parent_id"] for one in (step, next_step)] == [pair["id"]] * 2
    assert step["names"] == next_step["names"] == ["REQUEST_START", "QUEUE_START", *COMPUTED, "REQUEST_END"]
    assert (inner["model_name"], inner["parent_id"]) == ("inner", outer["id"]), "the other call is not followed"


def test_settings_change_what_is_followed_while_the_server_runs(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    flags = ("--trace-rate=1", f"--trace-file={path}")
    with Server(models(repository), flags=flags).started() as server:
        do(server, "inner", "result = 0")
        changed = {"trace_level": ["TENSORS"], "log_frequency": "1"}
        assert post(server, "/v2/models/inner/trace/setting", changed)["trace_level"] == ["TENSORS"]
        do(server, "outer", "result = 0")
        do(server, "inner", "result = 7")
        until((tmp_path / "trace.json.0").exists, "the first file")
        post(server, "/v2/models/inner/trace/setting", {"trace_level": None, "log_frequency": None})
        do(server, "inner", "result = 0")
    assert [file.name for file in tmp_path.glob("trace*")] == ["trace.json.0"]
    (only,) = read(tmp_path / "trace.json.0").values()
    assert only["names"] == []
    assert only["tensors"] == [
        ("TENSOR_QUEUE_INPUT", "DO", '"result = 7"'),
        ("TENSOR_BACKEND_OUTPUT", "OUT", '"7"'),
    ]


class Collector:
    """Takes OTLP over HTTP. `spans` are those received so far."""

    def __init__(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                for group in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resource = {a.key: a.value.string_value for a in group.resource.attributes}
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def tree(self) -> Any:
        """The spans by name, each with those below it in the order they started."""

        def below(parent: bytes) -> list[Any]:
            found = [span for span in self.spans if span.parent_span_id == parent]
            found.sort(key=lambda span: span.start_time_unix_nano)
            return [(span.name, below(span.span_id)) for span in found]

        known = {span.span_id for span in self.spans}
        roots = sorted({span.parent_span_id for span in self.spans} - known)
        return [one for root in roots for one in below(root)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def otel(collector: Collector, *more: str) -> tuple[str, ...]:
    settings = ("level=TIMESTAMPS", "mode=opentelemetry", f"opentelemetry,url={collector.url}", *more)
    return tuple(f"--trace-config={setting}" for setting in settings)


COMPUTE = ("compute", [])


def test_spans_show_requests_steps_and_calls_from_models(repository: Repository, collector: Collector) -> None:
    flags = otel(collector, "rate=1", "opentelemetry,resource=service.name=mine", "opentelemetry,resource=a=b")
    with Server(models(repository), flags=flags).started() as server:
        do(server, "pair", "result = 'result = 5'", id="p")
        context = json.loads(do(server, "outer", CALLING))
    pair = ("InferRequest", [("pair", [("inner", [COMPUTE]), ("inner", [COMPUTE])])])
    outer_below = [COMPUTE, ("inner", [COMPUTE])]
    assert collector.tree() == [pair, ("InferRequest", [("outer", outer_below)])]
    assert collector.resource["service.name"] == "mine"
    assert collector.resource["a"] == "b"
    spans = {span.name: span for span in collector.spans}
    outer = spans["outer"]
    assert context["traceparent"].split("-")[1:3] == [outer.trace_id.hex(), outer.span_id.hex()]
    attributes = {a.key: a.value.string_value or a.value.int_value for a in spans["pair"].attributes}
    assert attributes == {
        "triton.model_name": "pair",
        "triton.model_version": 1,
        "triton.trace_id": 1,
        "triton.trace_parent_id": 0,
        "triton.request_id": "p",
    }
    assert [event.name for event in spans["compute"].events] == COMPUTED
    assert [event.name for event in outer.events] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [event.name for event in spans["InferRequest"].events][:2] == ["HTTP_RECV_START", "HTTP_RECV_END"]


@pytest.mark.parametrize("flags", ["00", "01"])
def test_only_requests_that_come_with_a_context_are_followed_at_the_rate_0(
    repository: Repository, collector: Collector, flags: str
) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with Server(models(repository), flags=otel(collector, "rate=0")).started() as server:
        do(server, "inner", "result = 0")
        do(server, "inner", "result = 0", {"traceparent": "nonsense"})
        do(server, "outer", "result = 0", {"traceparent": f"00-{trace}-{parent}-{flags}", "tracestate": "k=v"})
    assert collector.tree() == [("InferRequest", [("outer", [COMPUTE])])]
    (root,) = [span for span in collector.spans if span.name == "InferRequest"]
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (trace, parent, "k=v")


def test_a_server_without_its_collector_serves_and_ends(repository: Repository, collector: Collector) -> None:
    flags = otel(collector, "rate=1")
    collector._server.server_close()
    with Server(models(repository), flags=flags).started() as server:
        assert do(server, "inner", "result = 0") == "0"
        assert server.stop() == 0


def test_a_file_shows_sequences_and_what_the_cache_answers(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    repository.doer("talk", config="sequence_batching { }")
    repository.doer("known", config="response_cache { enable: true }")
    flags = (
        *("--cache-config=local,size=100000", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1"),
        f"--trace-config=triton,file={path}",
    )
    with Server(repository, flags=flags).started() as server:
        for start, end in ((True, False), (False, True)):
            controls = {"sequence_id": 7, "sequence_start": start, "sequence_end": end}
            do(server, "talk", "result = 0", parameters=controls)
        for _ in range(2):
            do(server, "known", "result = 0")
    first, last, computed, cached = read(path).values()
    for one in (first, last, computed):
        assert one["names"][2:8] == ["REQUEST_START", "QUEUE_START", *COMPUTED]
    assert not set(COMPUTED) & set(cached["names"])
    assert {"REQUEST_START", "QUEUE_START", "REQUEST_END", "HTTP_SEND_END"} < set(cached["names"])
