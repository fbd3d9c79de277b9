"""The backend `python`: runs Triton's `model.py` files unchanged.

One instance per process. `execute` runs on the instance's thread, coroutines on an event loop in a thread of its
own, responses may come from any thread. Where a model's code fails, its requests get Triton's text.
"""

import asyncio
import json
import os
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from mypy_extensions import mypyc_attr

from naiad.backends.api import (
    BackendRequest,
    BackendResponse,
    ConfigDict,
    InstanceContext,
    ModelContext,
    RequestBackend,
)
from naiad.backends.python import current
from naiad.backends.python.event_loop import EventLoop
from naiad.backends.python.failures import end_fork, exception_text
from naiad.backends.python.loading import model_class
from naiad.backends.python.pb_utils import ModelConfig
from naiad.backends.python.request import REQUEST_RELEASE_RESCHEDULE, ReceivedRequest
from naiad.backends.python.response import InferenceResponse, result
from naiad.backends.python.sender import end, give_back, send_final
from naiad.backends.python.texts import json_text
from naiad.errors import Cancelled, Internal, NaiadError, Unsupported

_NO_RESPONSE: Final = (
    "execute returned no response for a request. Return a list with an InferenceResponse for each request, or answer "
    "through request.get_response_sender()."
)

_KINDS: Final = {"KIND_CPU": "CPU", "KIND_GPU": "GPU", "KIND_MODEL": "MODEL"}


@mypyc_attr(allow_interpreted_subclasses=True)
class PythonBackend(RequestBackend):
    """One instance of the class `TritonPythonModel` in a model's file."""

    instances_as: ClassVar[Literal["threads", "processes"]] = "processes"

    @classmethod
    def uses_gpus(cls) -> bool:
        return True

    @classmethod
    def autocomplete(cls, model: ModelContext) -> ConfigDict | None:
        """The configuration as `auto_complete_config` of the model's class has completed it."""
        current.enter(current.Instance(model.name, model.services, _model_folder(model)))
        host = os.getpid()
        try:
            python_class = model_class(model.path, model.is_alone)
            if not hasattr(python_class, "auto_complete_config"):
                return None
            completed = python_class.auto_complete_config(ModelConfig(json.dumps(model.config)))
            if not isinstance(completed, ModelConfig):
                raise Internal(
                    f"auto_complete_config function in model '{model.name}' must return a valid pb.ModelConfig object."
                )
            # Model code may have put anything into it. As JSON it is a configuration, or refused in Triton's words.
            config: ConfigDict = json.loads(json.dumps(completed.as_dict()))
        except BaseException as error:
            end_fork(host, error)
            raise Internal(exception_text(error)) from error
        return config

    def __init__(self, model: ModelContext, instance: InstanceContext) -> None:
        _check_parameters(model.parameters)
        self._name = instance.name
        self._path = model.path
        self._host = os.getpid()
        self._is_decoupled = bool(model.config.get("model_transaction_policy", {}).get("decoupled", False))
        self._is_iterative = bool(model.config.get("sequence_batching", {}).get("iterative_sequence", False))
        self._loop: EventLoop | None = None
        self._instance = current.Instance(instance.name, model.services, _model_folder(model))
        current.enter(self._instance)
        try:
            self._model = model_class(model.path, model.is_alone)()
            if asyncio.iscoroutinefunction(getattr(self._model, "is_ready", None)):
                # Now, since readiness and requests come from different threads.
                self._loop = EventLoop()
            if hasattr(self._model, "initialize"):
                self._model.initialize(_arguments(model, instance))
        except BaseException as error:
            end_fork(self._host, error)
            raise Internal(exception_text(error)) from error
        self._instance.is_serving = True

    def execute(self, requests: Sequence[BackendRequest]) -> list[BackendResponse | NaiadError] | None:
        current.enter(self._instance)
        received = [ReceivedRequest(request, self._is_decoupled) for request in requests]
        is_first = True
        while received:
            try:
                responses = self._run(received)
            except BaseException as error:
                end_fork(self._host, error)
                # Answered here, since responses may be out already; raised, so that the execution counts as failed.
                raise self._fail(received, error) from error
            if is_first and (results := _results(received, responses)) is not None:
                return results
            is_first = False
            received = self._answer(received, responses)
        return None

    @property
    def checks_readiness(self) -> bool:
        return hasattr(self._model, "is_ready")

    def is_ready(self) -> bool:
        current.enter(self._instance)
        try:
            ready = self._model.is_ready()
            if asyncio.iscoroutine(ready):
                ready = asyncio.run(ready) if self._loop is None else self._loop.run(ready).result()
        except BaseException as error:
            end_fork(self._host, error)
            raise Internal(exception_text(error)) from error
        if not isinstance(ready, bool):
            raise Internal("is_ready() must return a boolean value")
        return ready

    def close(self) -> None:
        self._instance.is_serving = False
        current.enter(self._instance)
        if self._loop is not None:
            self._loop.close()
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
            if self._instance.notes is not None:
                self._instance.notes.close()
        except BaseException as error:
            end_fork(self._host, error)
            self._log("ERROR", f"Failed to finalize model instance '{self._name}': {exception_text(error)}")

    def _run(self, received: list[ReceivedRequest]) -> list[InferenceResponse | None]:
        """Calls `execute` of the model and checks what it returns: one response or None for each request."""
        try:
            execute = self._model.execute
        except AttributeError:
            raise Internal(f"Python model {self._path} does not implement `execute` method.") from None
        responses = execute(received.copy())  # the model may do with its list what it likes
        if asyncio.iscoroutine(responses):
            responses = self._run_coroutine(responses, received)
        if responses is None:
            return [None] * len(received)
        if self._is_decoupled:
            raise Internal(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(responses, list):
            raise Internal(f"Expected a list in the execute return, found type '{type(responses)}'.")
        if len(responses) != len(received):
            raise Internal(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(received)}, and InferenceResponse(s) size is:{len(responses)}\n"
            )
        for request, response in zip(received, responses, strict=True):
            if response is None:
                continue
            if request._release_flags == REQUEST_RELEASE_RESCHEDULE:
                raise Internal(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(response)}'."
                )
            if not isinstance(response, InferenceResponse):
                raise Internal(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
            if request._sender is not None and request._sender._sent_count:
                raise Internal("Unable to send response. Non-decoupled model cannot send more than one response.")
        return responses

    def _answer(
        self, received: list[ReceivedRequest], responses: list[InferenceResponse | None]
    ) -> list[ReceivedRequest]:
        """Sends the responses and waits for those the model sends itself; in that case `received` ends empty.

        What the model wants rescheduled is the result: it goes through `execute` once more. Requests of iterative
        sequences go back to the scheduler instead, where others may join them.
        """
        again: list[ReceivedRequest] = []
        pending: list[threading.Event] = []
        for request, response in zip(received, responses, strict=True):
            if response is not None:
                self._end(request, _result(response, request._source))
            elif request._release_flags == REQUEST_RELEASE_RESCHEDULE:
                if request.is_cancelled():
                    self._end(request, Cancelled("request is cancelled"))
                elif self._is_iterative:
                    if request._sender is not None:
                        give_back(request._sender)
                    else:
                        request._source.reschedule()
                else:
                    again.append(ReceivedRequest(request._source, self._is_decoupled, request._sender))
            elif not self._is_decoupled:
                if request._sender is None:
                    self._end(request, Internal(self._describe(_NO_RESPONSE)))
                elif request._sender._ended is not None:
                    pending.append(request._sender._ended)
        if pending:
            # A sender that the model has forgotten ends when nobody holds it: we must not either.
            received.clear()
            del request
            for ended in pending:
                ended.wait()
        return again

    def _fail(self, received: list[ReceivedRequest], error: BaseException) -> Internal:
        """Answers all requests that are still open with what went wrong in `execute`; returns that."""
        failed = Internal(self._describe(exception_text(error)))
        self._log("ERROR", failed.message)
        for request in received:
            self._end(request, failed)
        return failed

    def _describe(self, text: str) -> str:
        return f"Failed to process the request(s) for model '{self._name}', message: {text}"

    def _end(self, request: ReceivedRequest, answer: BackendResponse | NaiadError) -> None:
        if request._sender is not None:
            end(request._sender, answer)
        else:
            send_final(request._source, answer)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any], received: list[ReceivedRequest]) -> Any:
        """The result of a coroutine on the model's event loop; a decoupled model's goes on in the background."""
        if self._loop is None:
            self._loop = EventLoop()
        future = self._loop.run(coroutine)
        if not self._is_decoupled:
            return future.result()

        def done(ended: Any) -> None:
            if not ended.cancelled() and (error := ended.exception()) is not None:
                self._fail(received, error)

        future.add_done_callback(done)
        return None

    def _log(self, level: Literal["ERROR", "WARNING", "INFO", "VERBOSE"], message: str) -> None:
        self._instance.services.log(level, message, "python.py", 0)


def _results(
    received: Sequence[ReceivedRequest], responses: Sequence[InferenceResponse | None]
) -> list[BackendResponse | NaiadError] | None:
    """The answers of all requests, if the model has returned one for each and nobody has a sender."""
    results: list[BackendResponse | NaiadError] = []
    for request, response in zip(received, responses, strict=True):
        if response is None or request._sender is not None:
            return None
        results.append(_result(response, request._source))
    return results


def _result(response: InferenceResponse, source: BackendRequest) -> BackendResponse | NaiadError:
    try:
        return result(response, source.outputs)
    except Exception as error:  # a tensor that cannot be fetched from its GPU
        return Internal(exception_text(error))


def _model_folder(model: ModelContext) -> Path:
    """Where model code looks for the files of its model: also that of a Python-based backend, which lies elsewhere."""
    folder = model.path.parent
    return folder if folder.is_relative_to(model.version_directory) else model.version_directory


def _arguments(model: ModelContext, instance: InstanceContext) -> dict[str, str]:
    """What `initialize` gets; all strings."""
    return {
        "model_config": json_text(model.config),
        "model_instance_kind": _KINDS[instance.kind],
        "model_instance_name": instance.name,
        "model_instance_device_id": str(instance.device_id),
        "model_repository": str(model.directory),
        "model_version": str(model.version),
        "model_name": model.name,
    }


def _check_parameters(parameters: dict[str, str]) -> None:
    force = parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes")
    if force not in ("yes", "no"):
        raise Unsupported(f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: {force}'")
