"""The routes: from a path to a handler and its arguments. Pure, but for a cache of paths seen.

Triton compares paths raw and in full: no trailing slash, no percent-decoding.
"""

import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from naiad.errors import InvalidArgument
from naiad.frontends.http.connection import Exchange, Headers
from naiad.frontends.http.generate import Generation
from naiad.frontends.http.inference import Inference
from naiad.frontends.http.management import Management
from naiad.frontends.http.openapi import Described, document
from naiad.frontends.http.replies import JSON, PLAIN, reply_json
from naiad.frontends.http.streaming import Streaming
from naiad.options import Restriction
from naiad.protocol.json_text import dump

#: Answers an exchange: before it returns, or in the coroutine it returns.
Handler = Callable[..., Coroutine[Any, Any, None] | None]

_GET = frozenset(("GET",))
_POST = frozenset(("POST",))
_BOTH = _GET | _POST
_LARGEST_VERSION = 2**63 - 1
_LARGEST_DIGITS = len(str(_LARGEST_VERSION))
_CACHED = 1024

_MODEL = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(infer|infer_stream|generate|generate_stream|ready|stats|config|trace/setting))?"
)
_REPOSITORY = re.compile(r"/v2/repository(?:/([^/]+))?/(?:(index)|models/([^/]+)/(load|unload))")
_REGION = re.compile(r"/v2/(system|cuda)sharedmemory(?:/region/([^/]+))?/(status|register|unregister)")


class Route(NamedTuple):
    """A handler, what it is called with after the exchange, and what the way to it depends on.

    `restriction` names the header and its value without which the route is closed.
    """

    handler: Handler
    arguments: tuple[Any, ...]
    methods: frozenset[str]
    error_headers: Headers
    restriction: Restriction | None


class Routes:
    def __init__(
        self,
        inference: Inference,
        streaming: Streaming,
        generation: Generation,
        management: Management,
        restrictions: Sequence[Restriction] = (),
    ) -> None:
        self._management = management
        self._restrictions = {
            category: restriction for restriction in restrictions for category in restriction.categories
        }
        #: (handler, category, methods, error headers) of what stands behind a model's name.
        self._of_model: dict[str | None, tuple[Handler, str, frozenset[str], Headers]] = {
            None: (management.model_metadata, "metadata", _GET, JSON),
            "infer": (inference.infer, "inference", _POST, PLAIN),
            "infer_stream": (streaming.infer_stream, "inference", _POST, JSON),
            "generate": (generation.generate, "inference", _POST, JSON),
            "generate_stream": (generation.generate_stream, "inference", _POST, JSON),
            "ready": (management.model_ready, "health", _GET, PLAIN),
            "stats": (management.statistics, "statistics", _GET, JSON),
            "config": (management.model_config, "model-config", _GET, JSON),
        }
        self._of_region: dict[tuple[str, str], tuple[Handler, frozenset[str]]] = {
            ("system", "status"): (management.system_status, _GET),
            ("system", "register"): (management.system_register, _POST),
            ("system", "unregister"): (management.system_unregister, _POST),
            ("cuda", "status"): (management.cuda_status, _GET),
            ("cuda", "register"): (management.cuda_register, _POST),
            ("cuda", "unregister"): (management.cuda_unregister, _POST),
        }
        self._fixed = {
            "/v2": self._route(management.server_metadata, "metadata", _GET, JSON),
            "/v2/openapi.json": self._route(self._openapi, "metadata", _GET, JSON),
            "/v2/health/live": self._route(management.live, "health", _GET, PLAIN),
            "/v2/health/ready": self._route(management.ready, "health", _GET, PLAIN),
            "/v2/models/stats": self._route(management.statistics, "statistics", _GET, JSON),
            "/v2/trace/setting": self._route(management.trace_setting, "trace", _BOTH, JSON),
            "/v2/logging": self._route(management.logging, "logging", _BOTH, JSON),
        }
        self._document = dump(document(self.described()))
        self._cache: dict[str, Route] = dict(self._fixed)

    def described(self) -> Iterator[Described]:
        """All of them, with parameters in braces."""

        def describe(path: str, route: Route) -> Described:
            restriction = route.restriction
            name = route.handler.__name__.removeprefix("_")
            return Described(path, name, route.methods, None if restriction is None else restriction.key)

        for path, route in self._fixed.items():
            yield describe(path, route)
        for action in self._of_model:
            for version in ("", "/versions/{version}"):
                end = f"/{action}" if action else ""
                route = self._of(f"/v2/models/{{model}}{version and '/versions/1'}{end}")
                yield describe(f"/v2/models/{{model}}{version}{end}", route)
        for kind, action in self._of_region:
            for region in ("", "/region/{region}"):
                path = f"/v2/{kind}sharedmemory{region}/{action}"
                if region or action != "register":
                    yield describe(path, self._of(path))
        for path in (
            "/v2/models/{model}/trace/setting",
            "/v2/repository/index",
            "/v2/repository/{repository}/index",
            "/v2/repository/models/{model}/load",
            "/v2/repository/models/{model}/unload",
        ):
            yield describe(path, self._of(path))

    def _of(self, template: str) -> Route:
        """The route of a path with parameters in braces: their names will do for values."""
        route = self._match(template)
        assert route is not None, f"this is a bug: nothing is served at {template}"
        return route

    def _openapi(self, exchange: Exchange) -> None:
        reply_json(exchange, self._document)

    def find(self, path: str) -> Route | None:
        """The route of a raw path, None where there is none."""
        route = self._cache.get(path)
        if route is None:
            route = self._match(path)
            if route is not None:
                if len(self._cache) >= _CACHED:
                    self._cache = dict(self._fixed)
                self._cache[path] = route
        return route

    def _match(self, path: str) -> Route | None:
        if match := _MODEL.fullmatch(path):
            name, version_text, action = match.groups()
            if action == "trace/setting":
                if version_text is not None:
                    return None
                return self._route(self._management.trace_setting, "trace", _BOTH, JSON, name)
            handler, category, methods, headers = self._of_model[action]
            digits = "" if version_text is None else version_text.lstrip("0") or "0"
            # Python reads no number of thousands of digits.
            if len(digits) > _LARGEST_DIGITS or (digits and int(digits) > _LARGEST_VERSION):
                return self._route(_refuse_version, category, methods, headers, version_text)
            return self._route(handler, category, methods, headers, name, int(digits) if digits else -1)
        if match := _REPOSITORY.fullmatch(path):
            repository, index, name, action = match.groups()
            if index:
                return self._route(self._management.index, "model-repository", _POST, JSON)
            if repository is not None:
                return self._route(self._management.named_repository, "model-repository", _POST, JSON)
            handler = self._management.load if action == "load" else self._management.unload
            return self._route(handler, "model-repository", _POST, JSON, name)
        if match := _REGION.fullmatch(path):
            kind, name, action = match.groups()
            handler, methods = self._of_region[kind, action]
            return self._route(handler, "shared-memory", methods, JSON, name or "")
        return None

    def _route(
        self, handler: Handler, category: str, methods: frozenset[str], error_headers: Headers, *arguments: Any
    ) -> Route:
        return Route(handler, arguments, methods, error_headers, self._restrictions.get(category))


def _refuse_version(exchange: Exchange, text: str) -> None:
    raise InvalidArgument(
        f"failed to get model version from specified version string '{text}' (details: stol), version should be an "
        "integral value > 0"
    )
