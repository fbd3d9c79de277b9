"""`pb_utils.InferenceResponseSender`: answers to one request, from any thread, during and after `execute`.

The host wants exactly one final answer per request. A model may forget it, so a sender that is let go without one
ends its request.
"""

import threading
from functools import partial
from operator import index
from typing import Any, Final

from naiad.backends.api import BackendRequest, BackendResponse
from naiad.backends.python import dropped
from naiad.backends.python.failures import TritonModelException
from naiad.backends.python.response import InferenceResponse, result
from naiad.errors import Internal, NaiadError

RESPONSE_COMPLETE_FINAL: Final = 1

_NO_RESPONSE: Final = "The model let go of its response sender without sending a response."

#: Guards the state of all senders; held for a few instructions, never while something is sent.
_lock: Final = threading.Lock()


class InferenceResponseSender:
    """Sends the responses of one request: one for an ordinary model, any number for a decoupled one."""

    # `_is_closed` is what the model may know, `_has_ended` that the host has its final answer.
    __slots__ = ("_ended", "_endings", "_has_ended", "_is_closed", "_is_decoupled", "_sent_count", "_source")

    def __init__(self, source: BackendRequest, is_decoupled: bool) -> None:
        self._source = source
        self._is_decoupled = is_decoupled
        self._sent_count = 0
        self._is_closed = False
        self._has_ended = False
        #: Set at the end; `execute` of an ordinary model waits for it.
        self._ended = None if is_decoupled else threading.Event()
        self._endings = dropped.endings()

    def send(self, response: object = None, flags: Any = 0) -> None:
        """Sends a response, or with the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL the last one, which may be None.

        Raises TritonModelException when there may be no such response, or it cannot be sent.
        """
        flags = index(flags)
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None:
            if flags == 0:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set to zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise TypeError(f"send needs an InferenceResponse, got {type(response)}")
        answer = None if response is None else result(response, self._source.outputs)
        with _lock:
            if not self._is_decoupled:
                if response is not None and self._sent_count:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and not self._sent_count:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
            if self._is_closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            if flags == RESPONSE_COMPLETE_FINAL:
                self._is_closed = True
            self._sent_count += 1
            if self._has_ended:  # an ordinary model closes after its one response
                return
            final = not self._is_decoupled or flags == RESPONSE_COMPLETE_FINAL
            self._has_ended = final
        try:
            self._source.send(answer, final)
        except NaiadError as error:
            if final:
                self._source.send(error, True)
            raise TritonModelException(error.message) from error
        finally:
            if final and self._ended is not None:
                self._ended.set()

    def is_cancelled(self) -> bool:
        return self._source.is_cancelled()

    def __del__(self) -> None:
        # A constructor that failed leaves no `_has_ended`.
        if not getattr(self, "_has_ended", True):
            self._endings.put(partial(_end_dropped, self._source, self._sent_count, self._ended))


def end(sender: InferenceResponseSender, answer: BackendResponse | NaiadError | None) -> None:
    """Gives the host the final answer, if it has none yet, and closes the sender."""
    with _lock:
        sender._is_closed = True
        if sender._has_ended:
            return
        sender._has_ended = True
    try:
        send_final(sender._source, answer)
    finally:
        if sender._ended is not None:
            sender._ended.set()


def give_back(sender: InferenceResponseSender) -> None:
    """Gives the request back to the scheduler, unless it has ended: what follows gets a sender of its own."""
    with _lock:
        sender._is_closed = True
        if sender._has_ended:
            return
        sender._has_ended = True
    try:
        sender._source.reschedule()
    finally:
        if sender._ended is not None:
            sender._ended.set()


def send_final(source: BackendRequest, answer: BackendResponse | NaiadError | None) -> None:
    """Gives the host the final answer of a request, or the reason why it cannot be sent."""
    try:
        source.send(answer, True)
    except NaiadError as error:
        source.send(error, True)


def _end_dropped(source: BackendRequest, sent_count: int, ended: threading.Event | None) -> None:
    try:
        source.send(None if sent_count else Internal(_NO_RESPONSE), True)
    except NaiadError:
        pass  # The host has given the request up itself.
    finally:
        if ended is not None:
            ended.set()
