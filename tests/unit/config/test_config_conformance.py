"""The recorded answers of Triton about configurations, without a server.

Needs the conformance corpus beside the repository. What only shows when a backend or an instance is made (a backend
that is not there, warm-up) is accepted here and checked by replaying the corpus.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from naiad.config.model_config import ModelConfig
from naiad.config.read import Draft, finish, prepare, read_draft, read_labels
from naiad.config.validate import resolve_ensemble
from naiad.errors import Internal, InvalidArgument, NaiadError

CORPUS = Path(__file__).parents[4] / "shared" / "conformance"
MODELS = CORPUS / "models" / "invalid"

#: Refused by the recorded server for reasons outside of the configuration.
NOT_OF_THE_CONFIGURATION = {"unknown_backend", "warmup_bad_type", "warmup_no_inputs"}
KINDS = {"Invalid argument": InvalidArgument, "Internal": Internal}

_POLL = "failed to load '{}', failed to poll from model repository"
_VERSION = re.compile(r"load failed for model '\w+': version 1 is at UNAVAILABLE state: ([\w ]+): (.*);\n")
_MODEL = re.compile(r"load failed for model '\w+': (.*)\n")


def _cases(area: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    path = CORPUS / "cases" / f"{area}.json"
    if not path.exists():
        return []
    return [(group, case) for group in json.loads(path.read_text())["groups"] for case in group["cases"]]


def _loads() -> list[Any]:
    cases: list[Any] = []
    for group, case in _cases("invalid_config"):
        for step in case["steps"]:
            path = step.get("path", "")
            if path.endswith("/load"):
                strict = "--disable-auto-complete-config" in group["server"]["flags"]
                cases.append(pytest.param(path.split("/")[-2], strict, step, case, id=case["id"]))
    return cases or [
        pytest.param("", False, {}, {}, marks=pytest.mark.skip(reason=f"no conformance corpus at {CORPUS}"))
    ]


def _configs() -> list[Any]:
    cases = [
        pytest.param(case["steps"][0]["expect"]["body"]["json"], id=case["id"])
        for _, case in _cases("metadata")
        if case["id"].startswith("config-")
    ]
    return cases or [pytest.param({}, marks=pytest.mark.skip(reason=f"no conformance corpus at {CORPUS}"))]


def _members(draft: Draft) -> dict[str, ModelConfig]:
    members: dict[str, ModelConfig] = {}
    for name in draft.members:
        try:
            members[name] = finish(read_draft(MODELS / name, name))
        except NaiadError:
            continue
    return members


def _complete(draft: Draft) -> ModelConfig:
    prepare(draft)
    config = resolve_ensemble(finish(draft), _members(draft))
    read_labels(draft.directory, config)
    return config


@pytest.mark.parametrize(("name", "strict", "step", "case"), _loads())
def test_load(name: str, strict: bool, step: dict[str, Any], case: dict[str, Any]) -> None:
    error = step["expect"]["body"].get("json", {}).get("error", "")
    directory = MODELS / name
    if error == _POLL.format(name):
        with pytest.raises(NaiadError) as caught:
            read_draft(directory, name, auto_complete=not strict)
        (log,) = step.get("reference_log") or case["reference_log"]
        reason = log.removeprefix(f"Poll failed for model directory '{name}': ")
        assert reason in caught.value.message.replace(str(MODELS), "{repo}")
        return
    draft = read_draft(directory, name, auto_complete=not strict)
    if not error or name in NOT_OF_THE_CONFIGURATION or "under the version policy" in error:
        assert _complete(draft).name == name
        return
    with pytest.raises(NaiadError) as caught:
        _complete(draft)
    text = caught.value.message.replace(str(MODELS), "{repo}")
    if of_version := _VERSION.fullmatch(error):
        assert isinstance(caught.value, KINDS[of_version[1]])
        assert text == of_version[2]
    else:
        of_model = _MODEL.fullmatch(error)
        assert of_model is not None
        assert text == of_model[1]


@pytest.mark.parametrize("expected", _configs())
def test_config(expected: dict[str, Any]) -> None:
    """What `GET config` shows. Where the model completes itself, what it says is taken from the answer."""
    name = expected["name"]
    draft = read_draft(CORPUS / "models" / "core" / name, name)
    proposal = prepare(draft)
    if name.startswith("auto_"):
        for field in ("max_batch_size", "input", "output", "model_transaction_policy"):
            if field in expected:
                proposal[field] = expected[field]
        if "dynamic_batching" in expected:
            proposal["dynamic_batching"] = {}
    config = finish(draft, proposal)
    members = {member: finish(read_draft(CORPUS / "models" / "core" / member, member)) for member in draft.members}
    shown = json.loads(resolve_ensemble(config, members).json)
    assert shown == expected
    assert _types(shown) == _types(expected)


def _types(value: Any) -> Any:
    """Tells 1 from 1.0 and from true, which compare equal."""
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_types(item) for item in value]
    return type(value).__name__
