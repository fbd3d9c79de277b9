"""Turns a source into a loaded version: host, completed configuration, instances, scheduler, labels. On the event loop."""

import asyncio
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from naiad.config.model_config import ModelConfig
from naiad.config.platforms import is_runtime
from naiad.config.read import Draft, finish, prepare, read_labels, with_instances_of
from naiad.config.validate import resolve_ensemble
from naiad.errors import InvalidArgument, NaiadError
from naiad.instances.hosts import Hosts, ModelSpec
from naiad.instances.instance import Instance
from naiad.instances.interpreter import ENVIRONMENT_PARAMETER, interpreter_of
from naiad.instances.provision import Environments
from naiad.instances.references import GROUP
from naiad.messages import InferRequest, ResponseSink
from naiad.models.gpu_limits import GpuLimits
from naiad.models.instances import VersionInstances
from naiad.models.model import InstanceUpdate, Model
from naiad.models.placement import placed_instances
from naiad.models.table import Source
from naiad.scheduling.cache import CachingScheduler, Store
from naiad.scheduling.dynamic import DynamicScheduler
from naiad.scheduling.ensemble import EnsembleScheduler, members_of
from naiad.scheduling.queue import RequestQueue
from naiad.scheduling.rate_limit import NoLimiter, RateLimiter
from naiad.scheduling.scheduler import Call, Progress, Scheduler
from naiad.scheduling.sequence import SequenceScheduler
from naiad.scheduling.states import read_initial_states
from naiad.statistics import InferStatistics, ModelStatistics
from naiad.telemetry.log import Log


class ModelLoader:
    """Loads single versions. `infer` runs the steps of ensembles; `lookup` finds their members."""

    def __init__(
        self,
        hosts: Hosts,
        *,
        log: Log,
        auto_complete: bool,
        backend_settings: Callable[[str], Mapping[str, str]],
        infer_statistics: Callable[[], InferStatistics],
        infer: Callable[[InferRequest, ResponseSink, Model, bool, Progress], Call],
        lookup: Callable[[str, int], Model],
        environments: Environments,
        backend_directory: Path,
        gpu_limits: GpuLimits,
        store: Store | None = None,
        limiter: NoLimiter | RateLimiter | None = None,
    ) -> None:
        self._hosts = hosts
        self._log = log
        self._auto_complete = auto_complete
        self._backend_settings = backend_settings
        self._infer_statistics = infer_statistics
        self._infer = infer
        self._lookup = lookup
        self._store = store
        self._limiter = limiter or NoLimiter()
        self._environments = environments
        self._backend_directory = backend_directory
        self._gpu_limits = gpu_limits

    async def load(self, source: Source, version: int) -> Model:
        """Loads one version. Raises NaiadError; then nothing of it is left."""
        draft = source.draft
        assert isinstance(draft, Draft), "this is a bug: a source that could not be read is being loaded"
        if draft.is_ensemble:
            return await self._load_ensemble(draft, version)
        version_directory = source.directory.versions[version].directory
        if not is_runtime(draft.backend, draft.proto.runtime):
            raise InvalidArgument(
                f"unable to find backend library '{draft.proto.runtime}' for model '{draft.name}', searched: "
                f"'{version_directory}' '{draft.directory}' '{self._backend_directory / draft.backend}'"
            )
        settings = dict(self._backend_settings(draft.backend))
        parameters = {key: value.string_value for key, value in draft.proto.parameters.items()}
        path = version_directory / (draft.proto.default_model_filename or f"model.{draft.backend}")
        shared_code = await asyncio.to_thread(self._python_based, draft.backend)
        if shared_code is not None:
            path = shared_code
        interpreter = None
        if (draft.backend == "python" or shared_code is not None) and ENVIRONMENT_PARAMETER not in parameters:
            interpreter = await self._environments.interpreter(
                draft.name, Path(draft.directory), version_directory, path.parent, parameters
            )
        if interpreter is None:
            interpreter = interpreter_of(draft.name, draft.backend, settings, parameters)
        hosted = await self._hosts.open(
            ModelSpec(
                name=draft.name,
                version=version,
                directory=draft.directory,
                version_directory=version_directory,
                path=path,
                backend=draft.backend,
                settings=settings,
                parameters=parameters,
                reference="python" if shared_code is not None else "",
                interpreter=interpreter,
            )
        )
        statistics = ModelStatistics(draft.name, str(version), infer=self._infer_statistics())
        instances = VersionInstances(
            hosted, self._limiter, version, statistics, Path(draft.directory), self._log, self._gpu_limits
        )
        try:
            return await self._load_into(instances, draft, version)
        except BaseException:
            await instances.close(0)
            raise

    async def update(self, model: Model, source: Source) -> InstanceUpdate:
        """Readies a loaded version for the instance groups of another source. Raises NaiadError; then it goes on as it
        is."""
        assert isinstance(source.draft, Draft), "this is a bug: a source that could not be read is being loaded"
        assert model.instances is not None, "this is a bug: an ensemble has no instances"
        return await model.update(
            with_instances_of(model.config, source.draft, uses_gpus=model.instances.hosted.uses_gpus)
        )

    def _python_based(self, backend: str) -> Path | None:
        """The model.py of a backend that is written as a Python model for all models that name it. Reads what is installed:
        for a thread."""
        if entry_points(group=GROUP, name=backend):
            return None
        path = self._backend_directory / backend / "model.py"
        return path if path.is_file() else None

    async def _load_into(self, instances: VersionInstances, draft: Draft, version: int) -> Model:
        hosted = instances.hosted
        proposal = await hosted.complete(prepare(draft, uses_gpus=hosted.uses_gpus)) if self._auto_complete else None
        config = finish(draft, proposal, uses_gpus=hosted.uses_gpus)
        labels = await asyncio.to_thread(read_labels, draft.directory, config)
        loaded = await instances.load(config, placed_instances(config))
        statistics = instances.statistics
        scheduler = await self._scheduler(draft, config, [each.instance for each in loaded], statistics)
        instances.begin(scheduler, loaded)
        return Model(
            config,
            version,
            self._cached(scheduler, config, version, statistics),
            statistics,
            labels,
            instances,
            readiness=hosted.is_ready if hosted.checks_readiness else None,
        )

    def _cached(
        self, scheduler: Scheduler, config: ModelConfig, version: int, statistics: ModelStatistics
    ) -> Scheduler:
        """The scheduler behind the response cache, where server and model have one."""
        if self._store is None or not config.response_cache:
            return scheduler
        # Answers of what was loaded under this number before are not those of other files.
        load = b"" if self._store.is_shared else os.urandom(16)
        return CachingScheduler(scheduler, self._store, version, statistics, self._log.exception, load)

    async def _scheduler(
        self, draft: Draft, config: ModelConfig, instances: list[Instance], statistics: ModelStatistics
    ) -> DynamicScheduler | SequenceScheduler:
        if config.scheduling == "sequence":
            return SequenceScheduler(
                config,
                instances,
                statistics,
                initial_states=await asyncio.to_thread(read_initial_states, Path(draft.directory), config),
                report=self._log.exception,
                warn=self._log.warning,
            )
        dynamic = config.dynamic_batching
        queue = queue_for(config)
        return DynamicScheduler(
            config.name,
            queue,
            instances,
            statistics,
            preserve_ordering=dynamic is not None and dynamic.preserve_ordering,
            report=self._log.exception,
        )

    async def _load_ensemble(self, draft: Draft, version: int) -> Model:
        config = finish(draft)
        held: dict[tuple[str, int], Model] = {}
        try:
            for step in config.ensemble_steps:
                try:
                    member = self._lookup(step.model_name, step.model_version)
                except NaiadError as error:
                    if step.model_version < 0:
                        raise
                    raise InvalidArgument(
                        f"ensemble '{draft.name}' depends on '{step.model_name}' whose required version"
                        f" {step.model_version} is not loaded."
                    ) from error
                if (step.model_name, step.model_version) not in held:
                    member.hold()
                    held[step.model_name, step.model_version] = member
            return await self._load_ensemble_of(held, config, draft, version)
        except BaseException:
            for member in held.values():
                member.let_go()
            raise

    async def _load_ensemble_of(
        self, held: Mapping[tuple[str, int], Model], config: ModelConfig, draft: Draft, version: int
    ) -> Model:
        """An ensemble keeps the versions it was made of: what is in flight ends on them, whatever becomes of them."""
        models: dict[str, ModelConfig] = {}
        labels: dict[str, list[str]] = {}

        def infer(request: InferRequest, sink: ResponseSink, admitted: bool, progress: Progress) -> Call:
            model = held[request.model_name, request.model_version]
            return self._infer(request, sink, model, admitted, progress)

        for step in config.ensemble_steps:
            member = held[step.model_name, step.model_version]
            models[step.model_name] = member.config
            for output, tensor in step.outputs.items():
                if tensor in config.outputs and output in member.labels:
                    labels[tensor] = member.labels[output]
        config = resolve_ensemble(config, models)
        labels |= await asyncio.to_thread(read_labels, Path(draft.directory), config)
        statistics = ModelStatistics(config.name, str(version), infer=self._infer_statistics())
        members = members_of(config, models)
        scheduler = EnsembleScheduler(config, version, members, statistics, infer, self._log.exception)
        cached = self._cached(scheduler, config, version, statistics)
        return Model(config, version, cached, statistics, labels, None, tuple(held.values()))


def queue_for(config: ModelConfig) -> RequestQueue:
    """The queue of a model with the dynamic batcher or with none."""
    dynamic = config.dynamic_batching
    if dynamic is None:
        return RequestQueue(config.max_batch_size, merge=False)
    return RequestQueue(
        config.max_batch_size,
        preferred=dynamic.preferred_batch_sizes,
        max_delay_ns=dynamic.max_queue_delay_us * 1000,
        levels=dynamic.priority_levels,
        default_level=dynamic.default_priority_level,
        default_policy=dynamic.default_queue_policy,
        policies=dynamic.priority_queue_policies,
    )
