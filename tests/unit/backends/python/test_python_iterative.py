"""RESCHEDULE in models of iterative sequences: the request goes back to the scheduler, not through `execute` again."""

import pytest
from python_backend_fakes import FakeRequest, load, write

from naiad.errors import Cancelled

ITERATIVE = {"sequence_batching": {"iterative_sequence": True}}

AGAIN = """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                {first}
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return {result}
"""


class ReturnedRequest(FakeRequest):
    """Counts how often it is given back."""

    def __init__(self, **more):
        super().__init__(**more)
        self.returned = 0

    def reschedule(self):
        assert not self.ended.is_set(), "given back after its end"
        self.returned += 1
        self.ended.set()


@pytest.mark.parametrize("first", ["pass", "request.get_response_sender()"])
def test_a_request_is_given_back_once_and_not_answered(tmp_path, first):
    backend = load(write(tmp_path, AGAIN.format(first=first, result="[None] * len(requests)")), **ITERATIVE)
    request = ReturnedRequest()
    backend.execute([request])
    assert request.returned == 1
    assert request.sent == []


def test_a_decoupled_request_is_given_back_after_a_response(tmp_path):
    first = "request.get_response_sender().send(pb_utils.InferenceResponse([]))"
    model = write(tmp_path, AGAIN.format(first=first, result="None"))
    backend = load(model, **ITERATIVE, model_transaction_policy={"decoupled": True})
    request = ReturnedRequest()
    backend.execute([request])
    assert request.returned == 1
    assert [final for _, final in request.sent] == [False]


def test_one_whose_client_has_left_is_not_given_back(tmp_path):
    backend = load(write(tmp_path, AGAIN.format(first="pass", result="[None] * len(requests)")), **ITERATIVE)
    request = ReturnedRequest()
    request.cancelled = True
    backend.execute([request])
    assert request.returned == 0
    assert isinstance(request.answer, Cancelled)
