"""The table of workloads fits the servers, the models and the generators it names."""

import pytest

from benchmarks.load import RESPONSES, closed_loop, stream
from benchmarks.models import MODELS
from benchmarks.servers import PEERS, SERVERS
from benchmarks.workloads import WORKLOADS, Workload

ALL = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)


def test_names_are_different() -> None:
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS)


@ALL
def test_servers_and_models_exist(workload: Workload) -> None:
    assert set(workload.servers) <= {"loop", *SERVERS}
    assert set(workload.models) <= MODELS.keys()


@ALL
def test_triton_and_peers_are_asked_for_nothing_they_cannot_do(workload: Workload) -> None:
    graphs = [name for name in workload.models if MODELS[name].graph]
    assert not (graphs and "triton" in workload.servers)
    peers = set(workload.servers) & set(PEERS)
    assert not (peers and workload.flags)
    assert len(workload.models) == 1 or not peers


@ALL
def test_a_loop_knows_its_framework(workload: Workload) -> None:
    assert ("loop" in workload.servers) == bool(workload.direct)


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w.form == "grpc" and w.measure is closed_loop], ids=str)
def test_streams_divide_the_requests_in_flight(workload: Workload) -> None:
    assert all(level % min(level, 8) == 0 for level in workload.levels)


def test_streams_ask_for_as_many_responses_as_are_counted() -> None:
    (workload,) = [workload for workload in WORKLOADS if workload.measure is stream]
    inputs = workload.inputs()
    assert inputs["INPUT0"].item() == RESPONSES
    assert workload.expected(inputs, None)["OUTPUT0"].item() == RESPONSES - 1
