"""Responses sent by the model itself: decoupled, and one by one for an ordinary model."""

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from python_backend_fakes import FakeRequest, FakeServices, load, write

from naiad.backends.api import BackendResponse
from naiad.backends.python import dropped, pb_utils
from naiad.backends.python.sender import InferenceResponseSender
from naiad.errors import Internal, NaiadError, ResourceExhausted

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
DECOUPLED: dict[str, Any] = {"model_transaction_policy": {"decoupled": True}}
SECONDS = 10


def response() -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse()


def kinds(request: FakeRequest) -> list[tuple[str, bool]]:
    return [(type(result).__name__, final) for result, final in request.sent]


def test_what_a_decoupled_model_may_send() -> None:
    request = FakeRequest()
    sender = InferenceResponseSender(request, True)
    sender.send(response())
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("x", pb_utils.TritonError.NOT_FOUND)))
    sender.send(response(), FINAL)
    assert kinds(request) == [("BackendResponse", False), ("NotFound", False), ("BackendResponse", True)]


@pytest.mark.parametrize(
    ("decoupled", "before", "arguments", "text"),
    [
        (True, [], (None, 2), "Unable to send response. Unsupported flag provided."),
        (True, [], (None, 0), "Inference Response object must be provided when the response flags is set to zero."),
        (True, [(None, FINAL)], (response(), 0), "Unable to send response. Response sender has been closed."),
        (True, [(None, FINAL)], (None, FINAL), "Unable to send response. Response sender has been closed."),
        (
            False,
            [(response(), 0)],
            (response(), 0),
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
        (
            False,
            [],
            (None, FINAL),
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
        ),
        (False, [(response(), FINAL)], (None, FINAL), "Unable to send response. Response sender has been closed."),
    ],
)
def test_what_it_may_not(decoupled: bool, before: list[Any], arguments: tuple[Any, int], text: str) -> None:
    request = FakeRequest()
    sender = InferenceResponseSender(request, decoupled)
    for sent in before:
        sender.send(*sent)
    with pytest.raises(pb_utils.TritonModelException) as error:
        sender.send(*arguments)
    assert str(error.value) == text


@pytest.mark.parametrize("decoupled", [False, True])
def test_flags_may_be_numpys(decoupled: bool) -> None:
    request = FakeRequest()
    InferenceResponseSender(request, decoupled).send(response(), np.uint32(FINAL))
    assert kinds(request) == [("BackendResponse", True)]
    assert [type(final) for _, final in request.sent] == [bool]


@pytest.mark.parametrize("flags", [0, FINAL])
def test_an_ordinary_request_ends_with_its_response(flags: int) -> None:
    request = FakeRequest()
    sender = InferenceResponseSender(request, False)
    sender.send(response(), flags)
    assert kinds(request) == [("BackendResponse", True)]
    if flags == 0:
        sender.send(flags=FINAL)
    assert kinds(request) == [("BackendResponse", True)]


@pytest.mark.parametrize("final", [False, True])
def test_a_response_that_cannot_be_sent(final: bool) -> None:
    request = FakeRequest()
    request.refusal = ResourceExhausted("too much")
    sender = InferenceResponseSender(request, True)
    with pytest.raises(pb_utils.TritonModelException, match=r"^too much$"):
        sender.send(response(), FINAL if final else 0)
    assert kinds(request) == ([("ResourceExhausted", True)] if final else [])
    if not final:
        sender.send(response(), FINAL)


def test_only_responses_can_be_sent() -> None:
    with pytest.raises(TypeError, match="send needs an InferenceResponse, got <class 'str'>"):
        InferenceResponseSender(FakeRequest(), True).send("x")  # type: ignore[arg-type]


def test_the_client_that_leaves_is_seen() -> None:
    request = FakeRequest()
    sender = InferenceResponseSender(request, True)
    assert not sender.is_cancelled()
    request.cancelled = True
    assert sender.is_cancelled()
    sender.send(flags=FINAL)


@pytest.mark.parametrize(
    ("sent", "ending"), [(0, ("Internal", True)), (1, ("NoneType", True))], ids=["nothing sent", "something sent"]
)
def test_a_sender_that_is_forgotten_ends_its_request(sent: int, ending: tuple[str, bool]) -> None:
    request = FakeRequest()
    sender = InferenceResponseSender(request, True)
    for _ in range(sent):
        sender.send(response())
    del sender
    assert request.ended.wait(SECONDS)
    assert kinds(request)[-1] == ending


LATE = """
    import threading

    class TritonPythonModel:
        def execute(self, requests):
            global go
            go = threading.Event()
            threading.Thread(target=self.work, args=(requests[0].get_response_sender(),)).start()
            return RESULT

        def work(self, sender):
            go.wait(10)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([1]))]))
            sender.send(flags=1)
    """


def test_a_decoupled_model_answers_after_execute(tmp_path: Path) -> None:
    request = FakeRequest(("Y",))
    load(write(tmp_path, LATE.replace("RESULT", "None")), **DECOUPLED).execute([request])
    assert request.sent == []
    sys.modules["1.model"].go.set()
    assert request.ended.wait(SECONDS)
    assert kinds(request) == [("BackendResponse", False), ("NoneType", True)]


@pytest.mark.parametrize("result", ["None", "[None]"])
def test_execute_of_an_ordinary_model_waits_for_the_response_of_its_thread(tmp_path: Path, result: str) -> None:
    source = LATE.replace("RESULT", result).replace("go.wait(10)", "pass")
    request = FakeRequest(("Y",))
    load(write(tmp_path, source)).execute([request])
    assert request.values == {"Y": [1]}


def test_execute_does_not_wait_for_a_sender_that_is_forgotten(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    request.get_response_sender()
                return None
        """,
    )
    requests = [FakeRequest(), FakeRequest()]
    load(path).execute(requests)
    text = "The model let go of its response sender without sending a response."
    assert [request.error for request in requests] == [text, text]


def test_a_response_sent_and_returned_is_an_error_of_the_batch(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                requests[0].get_response_sender().send(pb_utils.InferenceResponse())
                return [pb_utils.InferenceResponse() for _ in requests]
        """,
    )
    requests = [FakeRequest(), FakeRequest()]
    load(path).execute(requests)
    assert isinstance(requests[0].answer, BackendResponse)
    assert requests[1].error.endswith(
        "message: Unable to send response. Non-decoupled model cannot send more than one response."
    )


def test_a_response_may_be_returned_where_the_sender_was_only_looked_at(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                global sender
                sender = requests[0].get_response_sender()
                assert sender is requests[0].get_response_sender()
                return [pb_utils.InferenceResponse()]
        """,
    )
    request = FakeRequest()
    load(path).execute([request])
    assert request.values == {}
    with pytest.raises(pb_utils.TritonModelException, match="Response sender has been closed"):
        sys.modules["1.model"].sender.send(response())


def test_a_decoupled_model_must_not_return_responses(tmp_path: Path) -> None:
    path = write(tmp_path, "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n")
    request = FakeRequest()
    load(path, **DECOUPLED).execute([request])
    assert request.error == (
        "Failed to process the request(s) for model 'm_0_0', message: Python model 'm_0_0' is using the decoupled mode "
        "and the execute function must return None."
    )


def test_an_exception_ends_what_a_decoupled_model_has_begun(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            def execute(self, requests):
                global senders
                senders = [request.get_response_sender() for request in requests]
                senders[0].send(flags=1)
                senders[1].send(pb_utils.InferenceResponse())
                raise ValueError("x")
        """,
    )
    requests = [FakeRequest(), FakeRequest()]
    load(path, **DECOUPLED).execute(requests)
    assert kinds(requests[0]) == [("NoneType", True)]
    assert kinds(requests[1]) == [("BackendResponse", False), ("Internal", True)]
    with pytest.raises(pb_utils.TritonModelException, match="Response sender has been closed"):
        sys.modules["1.model"].senders[1].send(response())


def test_a_decoupled_request_nobody_looked_at_ends(tmp_path: Path) -> None:
    path = write(tmp_path, "class TritonPythonModel:\n    def execute(self, requests):\n        return None\n")
    request = FakeRequest()
    load(path, **DECOUPLED).execute([request])
    assert request.ended.wait(SECONDS)
    assert isinstance(request.answer, Internal)


def test_decoupled_coroutines_run_in_the_background(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                (request,) = requests
                sender = request.get_response_sender()
                if request.request_id() == "bad":
                    raise ValueError("async trouble")
                await asyncio.sleep(0)
                sender.send(pb_utils.InferenceResponse())
                sender.send(flags=1)
        """,
    )
    good, bad = FakeRequest(), FakeRequest(id="bad")
    backend = load(path, FakeServices(), **DECOUPLED)
    backend.execute([good])
    backend.execute([bad])
    assert good.ended.wait(SECONDS)
    assert bad.ended.wait(SECONDS)
    backend.close()
    assert kinds(good) == [("BackendResponse", False), ("NoneType", True)]
    assert isinstance(bad.answer, NaiadError)
    assert "message: ValueError: async trouble\n\nAt:\n" in bad.error


def test_a_rescheduled_decoupled_request_keeps_its_sender(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        class TritonPythonModel:
            left = 3

            def execute(self, requests):
                (request,) = requests
                self.left -= 1
                out = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([self.left]))])
                if self.left:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    request.get_response_sender().send(out)
                else:
                    request.get_response_sender().send(out, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
    )
    request = FakeRequest(("Y",))
    load(path, **DECOUPLED).execute([request])
    assert request.ended.wait(SECONDS)
    assert [result.outputs["Y"].tolist() for result, _ in request.sent] == [[2], [1], [0]]  # type: ignore[union-attr]


def test_an_ending_that_fails_keeps_no_other_from_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()

    def fail() -> None:
        raise RuntimeError("no thread to be had")

    dropped.endings().put(fail)
    dropped.endings().put(ended.set)
    assert ended.wait(20)
    assert "no thread to be had" in capfd.readouterr().err
