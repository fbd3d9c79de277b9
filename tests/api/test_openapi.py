"""Requests that schemathesis makes from the document the server has of itself: each answer is one the document knows."""

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import schemathesis
from schemathesis.checks import CheckContext
from schemathesis.specs.openapi import checks
from served import Repository, Server

#: For all operations together; those that are left then are asked by the next run, in another order.
_BUDGET_S = 40.0
_NAMES = ("echo", "strings", "words")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.echo("echo")
    repository.echo("strings", datatype="STRING", config="max_batch_size: 4")
    repository.doer("words")
    with Server(repository) as server:
        yield server.started()


def fetch(server: Server, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[0]}{path}", timeout=30) as answer:
        return json.load(answer)


def test_the_document_names_all_routes(server: Server) -> None:
    paths = fetch(server, "/v2/openapi.json")["paths"]
    assert {path for path in paths if "{" not in path} == {
        "/v2",
        "/v2/openapi.json",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/stats",
        "/v2/trace/setting",
        "/v2/logging",
        "/v2/repository/index",
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/unregister",
        "/v2/cudasharedmemory/status",
        "/v2/cudasharedmemory/unregister",
    }
    actions = ("", "/infer", "/infer_stream", "/generate", "/generate_stream", "/ready", "/stats", "/config")
    for version in ("", "/versions/{version}"):
        for action in actions:
            assert f"/v2/models/{{model}}{version}{action}" in paths
    assert set(paths["/v2/trace/setting"]) == {"get", "post"}
    assert len(paths) == 12 + 2 * len(actions) + 10


def test_answers_are_those_of_the_document(server: Server) -> None:
    api = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.ports[0]}/v2/openapi.json")
    until = time.monotonic() + _BUDGET_S
    asked = 0
    for found in api.get_all_operations():
        operation = found.ok()

        @hypothesis.settings(
            max_examples=12,
            deadline=None,
            database=None,
            phases=(hypothesis.Phase.generate,),
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(), name=st.none() | st.sampled_from(_NAMES))
        def ask(case: schemathesis.Case, name: str | None) -> None:
            nonlocal asked
            if time.monotonic() > until:
                return
            if name is not None and "model" in case.path_parameters:
                case.path_parameters["model"] = name
                if "version" in case.path_parameters:
                    case.path_parameters["version"] = "1"
            answer = case.call(timeout=30)
            case.validate_response(
                answer,
                checks=(
                    checks.status_code_conformance,
                    checks.content_type_conformance,
                    checks.response_schema_conformance,
                    _no_bug,
                ),
            )
            asked += 1

        ask()
    assert asked > 100
    assert server.is_live()
    assert "Traceback" not in server.log


def _no_bug(context: CheckContext, response: Any, case: schemathesis.Case) -> None:
    """An error that nobody has thought of is a bug, whatever the request was."""
    assert "unexpected error: " not in response.text, response.text
