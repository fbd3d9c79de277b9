"""The engine: the only object a front end sees. On the event loop; every method raises only NaiadError.

HTTP, gRPC, calls from inside models and the steps of ensembles all come through it.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from naiad import __version__
from naiad.config.model_config import ModelConfig
from naiad.datatypes import TakesLong
from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable
from naiad.messages import InferRequest, ResponseSink
from naiad.metadata import IndexEntry, ModelMetadata, ServerMetadata
from naiad.models.check import BrokenContents, Checked
from naiad.models.manager import ModelManager
from naiad.models.model import Model
from naiad.scheduling.scheduler import Call, Progress
from naiad.statistics import ModelStatistics

#: What `GET /v2` lists, in Triton's order (reference R1-74).
EXTENSIONS: Final = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class Engine:
    """Leases models, checks requests, submits calls; answers what clients ask about server and models."""

    def __init__(self, manager: ModelManager, *, server_id: str = "triton", strict_readiness: bool = True) -> None:
        self._manager = manager
        self._table = manager.table
        self._records = self._table.records
        self._metadata = ServerMetadata(server_id, __version__, EXTENSIONS)
        self._strict_readiness = strict_readiness
        self._started = False
        self._exiting = False
        self._checking: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Engine {self._metadata.name} {self._manager!r}>"

    # ---------------------------------------------------------------- life

    def started(self) -> None:
        """The first models have been loaded or have failed."""
        self._started = True

    def exiting(self) -> None:
        """From now on the server is not ready and takes no requests but those of sequences that have begun; what is in
        flight still ends."""
        self._exiting = True

    def _require_ready(self) -> None:
        if self._exiting:
            raise Unavailable("Server not ready")

    def is_live(self) -> bool:
        if self._exiting:
            raise Unavailable("Server exiting")
        return self._started

    async def is_ready(self) -> bool:
        if self._exiting:
            raise Unavailable("Server exiting")
        if not self._started or not self._strict_readiness:
            return self._started
        asked = [model.readiness() for model in self._table.models() if model.readiness is not None]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return self._table.all_ready() and all(answer is True for answer in answers)

    async def model_ready(self, name: str, version: int = -1) -> bool:
        """Whether a version is loaded and able, and says so itself where its code has `is_ready`. Raises what that
        raises."""
        self._require_ready()
        if not self._table.is_ready(name, version):
            return False
        readiness = self._table.lookup(name, version).readiness
        return readiness is None or await readiness()

    # ---------------------------------------------------------------- inference

    def goes_on(self, name: str, version: int) -> bool:
        """Whether what a model version asks for belongs to what had begun before the server was about to end, as long as
        it has requests itself."""
        return not self._exiting or any(
            (model.name, model.version) == (name, version) and model.in_flight for model in self._table.models()
        )

    def model(self, name: str, version: int = -1) -> Model:
        """The loaded version; -1 is the newest. Raises NotFound or Unavailable."""
        if version < 0 and (record := self._records.get(name)) is not None and record.latest is not None:
            # What most ask for, without a call of code that is not compiled.
            return record.latest
        return self._table.lookup(name, version)

    def infer(
        self,
        request: InferRequest,
        sink: ResponseSink,
        model: Model | None = None,
        checked: asyncio.Future[Checked] | None = None,
        admitted: bool = False,
        progress: Progress | None = None,
    ) -> Call:
        """Checks a request and submits it. Raises NaiadError for a request that is refused at once; everything later
        goes to `sink`. `model` is for callers that have just looked it up, in this turn of the loop, or hold a lease of
        it, `checked` for those who have had the request checked. `admitted` are requests of what had begun before the
        server was about to end. `progress` is kept up to date until the turn of the loop in which the call ends is over."""
        if model is None:
            model = self.model(request.model_name, request.model_version)
        try:
            request, rows, signature = model.check(request) if checked is None else checked.result()
        except BrokenContents as error:
            model.lease()
            call = Call(request, 1, None, sink, model, model.scheduler)
            call.fail(InvalidArgument(error.message), "BACKEND")
            return call
        except TakesLong:
            return self._infer_slowly(request, sink, model, admitted, progress)
        trace = request.trace
        if trace is not None:
            sink = trace.begin(request, model.version, sink)
        if progress is not None:
            progress.version = model.version
        model.lease()
        call = Call(request, rows, signature, sink, model, model.scheduler, progress)
        try:
            if self._exiting and not admitted:
                if (stopped := model.scheduler.stopped(request)) is not None:
                    raise stopped
                call.is_late = True
            model.scheduler.submit(call)
        except Exception:
            # Whatever it is: a lease that is never given back keeps the version for ever.
            model.statistics.refused += 1
            call.ended = True
            model.release()
            if trace is not None:
                trace.end()
            raise
        return call

    def _infer_slowly(
        self, request: InferRequest, sink: ResponseSink, model: Model, admitted: bool, progress: Progress | None
    ) -> Call:
        """Has a thread check the request; if it is refused, its sink hears of it."""
        admitted = admitted or not self._exiting
        if request.sequence is not None:
            # The next one of its sequence must not overtake it.
            checked: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
            try:
                checked.set_result(model.check(request, True))
            except InvalidArgument as error:
                checked.set_exception(error)
            return self.infer(request, sink, model, checked, admitted, progress)
        model.lease()
        checking = _Checking()
        call = Call(request, 1, None, sink, model, checking, progress)
        task = asyncio.get_running_loop().create_task(self._infer_checked(call, checking, model, admitted))
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)
        return call

    async def _infer_checked(self, asked: Call, checking: "_Checking", model: Model, admitted: bool) -> None:
        checked = asyncio.get_running_loop().run_in_executor(None, model.check, asked.request, True)
        await asyncio.wait((checked,))
        if asked.cancelled:
            checked.exception()  # nobody waits for it
            asked.fail_cancelled()
            return
        try:
            checking.call = self.infer(asked.request, asked.sink, model, checked, admitted, asked.progress)
        except NaiadError as error:
            error.refused = True
            asked.sink.send(error, True)
        except Exception as error:
            asked.sink.send(Internal(f"unexpected error: {error}"), True)
            raise
        finally:
            model.release()

    # ---------------------------------------------------------------- about server and models

    def metadata(self) -> ServerMetadata:
        return self._metadata

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        self._require_ready()
        metadata = self._table.lookup(name, version).metadata
        if version >= 0:
            return metadata
        versions = self._table.versions(name)
        return ModelMetadata(metadata.name, versions, metadata.platform, metadata.inputs, metadata.outputs)

    def model_config(self, name: str, version: int = -1) -> ModelConfig:
        return self._table.lookup(name, version).config

    def statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        """The live statistics of the versions that serve: of all models, of all versions of one, or of one."""
        self._require_ready()
        if not name:
            return [model.statistics for model in self._table.models()]
        found = [model for model in self._table.models() if model.name == name]
        if not found:
            raise InvalidArgument(f"requested model '{name}' is not available")
        if version >= 0:
            found = [model for model in found if model.version == version]
            if not found:
                raise InvalidArgument(f"requested model version is not available for model '{name}'")
        return [model.statistics for model in found]

    async def index(self, ready: bool = False) -> list[IndexEntry]:
        self._require_ready()
        return self._table.index(await self._manager.names(), ready)

    async def load(self, name: str, parameters: Mapping[str, str | bytes] | None = None) -> None:
        self._require_ready()
        await self._manager.load(name, parameters or {})

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self._require_ready()
        await self._manager.unload(name, unload_dependents)


class _Checking:
    """Has a call until it is checked, in place of a scheduler; then another one goes on for it."""

    pending = 1
    sequences = 0

    def __init__(self) -> None:
        self.call: Call | None = None

    def stopped(self, request: InferRequest) -> NaiadError | None:
        return None

    def submit(self, call: Call) -> None:
        raise AssertionError("this is a bug: what is being checked has no queue")

    def withdraw(self, call: Call) -> None:
        if self.call is not None:
            self.call.cancel()

    async def close(self) -> None:
        pass
