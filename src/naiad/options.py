"""`ServerOptions`: every option of the server, once: flag, type, default, help and check.

The command line is made from it (`naiad.cli.serve`); the flags are those of Triton's server, with its texts for
wrong values. Values are checked wherever they come from. Nothing here reads the environment or prints.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from naiad.errors import InvalidArgument

#: What `--http-restricted-api` and `--grpc-restricted-protocol` can name.
API_CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)


@dataclass(frozen=True, slots=True)
class Restriction:
    """Categories of an API that are open only to requests with the header `key` and exactly this `value`."""

    categories: frozenset[str]
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class BackendSetting:
    """`--backend-config=<backend>,<key>=<value>`; `backend` is "" for all of them."""

    backend: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Setting:
    """`<scope>,<key>=<value>` of `--cache-config` and `--trace-config`; `scope` is "" where there is none."""

    scope: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """How much of a resource there is; `device` None means on every device."""

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """The command line side of one field of ServerOptions.

    `parse` turns the text of one occurrence into a value (an element of the tuple, if `repeatable`) and raises
    ValueError with the reason. `check` returns what is wrong with the field's value, or None. A `switch` takes no
    value. `unused` says why an option has no effect: it is taken for the sake of command lines of Triton.
    """

    flag: str
    group: str
    help: str
    metavar: str
    parse: Callable[[str], Any]
    check: Callable[[Any], str | None] | None = None
    repeatable: bool = False
    switch: bool = False
    aliases: tuple[str, ...] = ()
    unused: str = ""


# ---------------------------------------------------------------- texts to values; ValueError says what is wrong


def parse_bool(text: str) -> bool:
    """Triton's booleans: true, on, 1, false, off, 0, in any case."""
    if text.lower() in ("true", "on", "1"):
        return True
    if text.lower() in ("false", "off", "0"):
        return False
    raise ValueError(f"invalid value for bool option: {text}")


def _int(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]+", text):
        raise ValueError(f"Invalid option value. Got {text}")
    return int(text)


def _level(text: str) -> int:
    """A number, or a boolean for 1 and 0."""
    return _int({"true": "1", "false": "0"}.get(text.lower(), text))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"Invalid option value. Got {text}") from None


def _leading_float(text: str) -> float:
    """As C's strtod does, which Triton reads quantiles with: what follows the number is ignored."""
    match = _LEADING_FLOAT.match(text)
    return _float(match[0] if match else text)


_LEADING_FLOAT = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _choice(flag: str, *choices: str) -> Callable[[str], str]:
    """One of `choices`, in upper or lower case."""
    by_lower = {choice.lower(): choice for choice in choices}

    def parse(text: str) -> str:
        if text.lower() not in by_lower:
            raise ValueError(f"invalid argument for {flag}: '{text}'; expected one of {', '.join(choices)}")
        return by_lower[text.lower()]

    return parse


def _pair(text: str) -> tuple[str, str]:
    """`<first>:<second>`. What follows another colon is left out, as C's stoull does."""
    first, colon, second = text.partition(":")
    if not colon:
        raise ValueError(
            "Cannot parse pair option due to incorrect number of inputs.--<pair option> argument requires format "
            f"<first>:<second>. Found: {text}"
        )
    return first, second.partition(":")[0]


def _bytes_of_device(text: str) -> tuple[int, int]:
    device, size = _pair(text)
    return _int(device), _int(size)


def _share_of_device(text: str) -> tuple[int, float]:
    device, share = _pair(text)
    return _int(device), _float(share)


def _shares(limits: tuple[tuple[int, float], ...]) -> str | None:
    for device, share in limits:
        if device < 0:
            return f"expects device ID >= 0, got {device}"
        if not 0 <= share <= 1:
            return f"expects limit fraction to be in range [0.0, 1.0], got {share:f}"
    return None


def _client_shm(text: str) -> str:
    if text.lower() == "local":
        return "local"
    return "true" if parse_bool(text) else "false"


def _key_value(setting: str, flag: str, form: str, text: str) -> tuple[str, str]:
    """The two sides of `<setting>=<value>`, which is the `text` of an option or a part of it."""
    key, equals, value = setting.partition("=")
    if not equals or not key or not value:
        raise ValueError(f"{flag} option format is {form}. Got {text}")
    return key, value


def _restriction(flag: str) -> Callable[[str], Restriction]:
    def parse(text: str) -> Restriction:
        names, colon, header = text.partition(":")
        key, equals, value = header.partition("=")
        if not colon or not equals or not key or not value:
            raise ValueError(f"{flag} option format is '<config name>:<setting>=<value>'. Got {text}")
        categories = frozenset(name.strip() for name in names.split(","))
        for name in sorted(categories - frozenset(API_CATEGORIES)):
            raise ValueError(f"unknown restricted api '{name}'; there are {', '.join(API_CATEGORIES)}")
        return Restriction(categories, key, value)

    return parse


def _backend_setting(text: str) -> BackendSetting:
    scope, comma, rest = text.partition(",")
    # `--backend-config=<setting>=<value>` is for all backends; a comma may then be part of the value.
    if not comma or "=" in scope:
        scope, rest = "", text
    elif not scope:
        raise ValueError(
            "No backend specified. --backend-config option format is <backend name>,<setting>=<value> or "
            f"<setting>=<value>. Got {text}"
        )
    return BackendSetting(scope, *_key_value(rest, "--backend-config", "'<backend name>,<setting>=<value>'", text))


def _cache_setting(text: str) -> Setting:
    scope, comma, rest = text.partition(",")
    if not comma or not scope:
        raise ValueError(
            f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {text}"
        )
    return Setting(scope, *_key_value(rest, "--cache-config", "'<cache name>,<setting>=<value>'", text))


def _trace_setting(text: str) -> Setting:
    scope, comma, rest = text.partition(",")
    if not comma or "=" in scope:
        scope, rest = "", text
    if scope not in ("", "triton", "opentelemetry"):
        raise ValueError(
            f'invalid value for trace mode option: {scope}. Available options are "triton" and "opentelemetry"'
        )
    key, value = _key_value(rest, "--trace-config", "'<trace mode>,<setting>=<value>'", text)
    if not scope:
        if key == "level":
            if value.lower() not in ("true", "on", "1", "min", "max", "off", "timestamps", "tensors"):
                raise ValueError(f"invalid value for trace level option: {value.lower()}")
        elif key == "mode":
            value = value.lower()
            if value not in ("triton", "opentelemetry"):
                raise ValueError(
                    f'invalid value for trace mode option: {value}. Available options are "triton" and "opentelemetry"'
                )
        elif key in ("rate", "count"):
            _int(value)
        else:
            raise ValueError(f"unknown trace setting '{key}'; there are level, rate, count, mode")
    return Setting(scope, key, value)


def _trace_level(text: str) -> Setting:
    return _trace_setting(f"level={text}")


def _metrics_setting(text: str) -> tuple[str, str]:
    """One `--metrics-config`: the name and the text of a setting that `MetricsSettings` understands."""
    key, value = _key_value(text, "--metrics-config", "<setting>=<value>", text)
    if key in ("counter_latencies", "summary_latencies"):
        parse_bool(value)
    elif key == "histogram_latencies":
        if parse_bool(value):
            raise ValueError("histogram_latencies is not supported by this server; use summary_latencies")
    elif key == "summary_quantiles":
        parse_quantiles(value)
    else:
        raise ValueError(
            f"unknown metrics setting '{key}'; there are counter_latencies, summary_latencies, summary_quantiles"
        )
    return key, value


def parse_quantiles(text: str) -> tuple[tuple[float, float], ...]:
    """Pairs of quantile and allowed error: `"0.5:0.05,0.9:0.01"` -> `((0.5, 0.05), (0.9, 0.01))`."""
    pairs = []
    for part in text.split(","):
        quantile, colon, error = part.partition(":")
        if not colon:
            raise ValueError(f"summary_quantiles expects <quantile>:<error>,..., for example 0.5:0.05. Got {part}")
        pair = (_leading_float(quantile), _leading_float(error))
        if not all(0.0 <= number <= 1.0 for number in pair):
            raise ValueError(f"summary_quantiles expects quantiles and errors from 0 to 1. Got {part}")
        pairs.append(pair)
    return tuple(pairs)


def _rate_limit_resource(text: str) -> RateLimitResource:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not parts[0]:
        raise ValueError(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    return RateLimitResource(parts[0], _int(parts[1]), _int(parts[2]) if len(parts) == 3 else None)


# ---------------------------------------------------------------- checks of values; they return what is wrong


def _at_least(least: int, most: int | None = None) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if value is None or (value >= least and (most is None or value <= most)):
            return None
        return f"expected {least} or more, got {value}" if most is None else f"expected {least} to {most}, got {value}"

    return check


def _more_than_zero(value: float) -> str | None:
    return None if value > 0 else f"expected more than 0, got {value}"


def forward_pattern(text: str) -> re.Pattern[str]:
    """The pattern of headers to forward: found anywhere in a name, in any case unless it begins with (?-i).

    RE2 and Python disagree about where flags may stand, and Triton begins every pattern with (?i). Raises re.error.
    """
    if text.startswith("(?-i)"):
        return re.compile(text.removeprefix("(?-i)"))
    return re.compile(text, re.IGNORECASE)


def _pattern(value: str) -> str | None:
    try:
        forward_pattern(value)
    except re.error as error:
        return f"'{value}' is not a regular expression: {error}"
    return None


def _local_folders(paths: Iterable[str]) -> str | None:
    for path in paths:
        if path.startswith(("s3://", "gs://", "as://")):
            return f"'{path}' is not a folder: copy the models to one, or mount their storage"
    return None


def _config_name(value: str | None) -> str | None:
    if value is None:
        return None
    if not value:
        return "Error: empty argument for --model-config-name"
    if re.search(r"\s|/", value) or value in (".", ".."):
        return f"expected a name without spaces and slashes, got '{value}'"
    return None


def _one_group_each(restrictions: Iterable[Restriction]) -> str | None:
    seen: set[str] = set()
    for restriction in restrictions:
        for category in sorted(restriction.categories & seen):
            return f"restricted api '{category}' can not be specified in multiple config groups"
        seen |= restriction.categories
    return None


_port = _at_least(0, 65535)
_PARSE_BY_TYPE: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("boolean", parse_bool),
    int: ("integer", _int),
    float: ("number", _float),
    str: ("string", str),
}


def _option(
    group: str,
    flag: str,
    default: Any,
    help: str,
    *,
    kind: type = str,
    parse: Callable[[str], Any] | None = None,
    metavar: str = "",
    check: Callable[[Any], str | None] | None = None,
    repeatable: bool = False,
    switch: bool = False,
    aliases: tuple[str, ...] = (),
    unused: str = "",
) -> Any:
    """A field of ServerOptions with its Option. `kind` decides how texts are read unless `parse` does."""
    name, parse_kind = _PARSE_BY_TYPE[kind]
    option = Option(
        flag=flag,
        group=group,
        help=f"No effect: {unused}." if unused else help,
        metavar="" if switch else metavar or name,
        parse=parse or parse_kind,
        check=check,
        repeatable=repeatable,
        switch=switch,
        aliases=aliases,
        unused=unused,
    )
    return dataclasses.field(default=default, metadata={"option": option})


#: Why sizes of pools are taken and have no effect.
_NO_GPU_MEMORY = "the server keeps no tensors on GPUs; the frameworks of its models do"
_NO_THREADS = "one event loop serves all connections; --frontends gives them more processes"

# The headings of the help.
_server = partial(_option, "Server")
_logging = partial(_option, "Logging")
_repository = partial(_option, "Model repository")
_http = partial(_option, "HTTP")
_grpc = partial(_option, "gRPC")
_metrics = partial(_option, "Metrics")
_tracing = partial(_option, "Tracing")
_backends = partial(_option, "Backends")
_cache = partial(_option, "Response cache")
_rate = partial(_option, "Rate limiter")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The options of a server, checked. A field is named like its flag; the flag's help says what it means.

    Raises InvalidArgument, with Triton's text, when a value or a combination of values is wrong.
    """

    id: str = _server("--id", "triton", "Identifier for this server.")
    exit_timeout_secs: int = _server(
        "--exit-timeout-secs",
        30,
        "Time, in seconds, that requests in flight get to finish when the server exits. After it the server exits "
        "even if some are still in flight.",
        kind=int,
        check=_at_least(0),
    )
    isolation: Literal["model", "backend", "none"] = _server(
        "--isolation",
        "model",
        "Where models run: each in a process of its own (model), one process for all models of a backend (backend), "
        "or inside the server process (none; for debugging). A model's parameter NAIAD_HOST takes precedence.",
        parse=_choice("--isolation", "model", "backend", "none"),
        metavar="model|backend|none",
    )
    execution_timeout_secs: float = _server(
        "--execution-timeout-secs",
        600.0,
        "Time, in seconds, that one execution of a model may take. After it the model's process is ended and "
        "started again. 0 means no limit. A model's parameter NAIAD_EXECUTION_TIMEOUT_SECS takes precedence.",
        kind=float,
        check=_at_least(0),
    )
    busy_poll_us: int = _server(
        "--busy-poll-us",
        1000,
        "How long, in microseconds, the server and the processes of models look for each other's messages before they "
        "sleep, where such a message came as soon last time: answers come sooner, for more CPU time. 0: not at all, "
        "which is also so on a single core; under a CPU quota no more processes do so than that allows.",
        kind=int,
        check=_at_least(0),
    )
    frontends: int = _server(
        "--frontends",
        1,
        "How many processes read requests and write responses. 1: the server process does it itself. With more of "
        "them, which share the ports, throughput grows with the cores where that is the limit.",
        kind=int,
        check=_at_least(1, 256),
    )
    json_processes: int = _server(
        "--json-processes",
        -1,
        "How many processes may read and write JSON of more than 1 MB, so that it holds up no other client. They are "
        "started when such texts come one after the other. 0: threads of the server do it; -1: as many as there are "
        "cores, 4 at most, and none with several --frontends.",
        kind=int,
        check=_at_least(-1, 64),
    )
    pinned_memory_pool_byte_size: int = _server(
        "--pinned-memory-pool-byte-size", 268435456, "", kind=int, unused=_NO_GPU_MEMORY
    )
    cuda_memory_pool_byte_size: tuple[tuple[int, int], ...] = _server(
        "--cuda-memory-pool-byte-size",
        (),
        "",
        parse=_bytes_of_device,
        metavar="integer>:<integer",
        repeatable=True,
        unused=_NO_GPU_MEMORY,
    )
    cuda_virtual_address_size: tuple[tuple[int, int], ...] = _server(
        "--cuda-virtual-address-size",
        (),
        "",
        parse=_bytes_of_device,
        metavar="integer>:<integer",
        repeatable=True,
        unused=_NO_GPU_MEMORY,
    )
    buffer_manager_thread_count: int = _server(
        "--buffer-manager-thread-count",
        0,
        "",
        kind=int,
        unused="the server does not copy tensors with threads",
    )

    log_verbose: int = _logging(
        "--log-verbose",
        0,
        "Verbose logging level. 0 disables verbose logging, 1 and more enable it.",
        kind=int,
        parse=_level,
        check=_at_least(0),
    )
    log_info: bool = _logging("--log-info", True, "Log at the level info.", kind=bool)
    log_warning: bool = _logging("--log-warning", True, "Log at the level warning.", kind=bool)
    log_error: bool = _logging("--log-error", True, "Log at the level error.", kind=bool)
    log_format: Literal["default", "ISO8601", "json"] = _logging(
        "--log-format",
        "default",
        'Lines begin with "LMMDD hh:mm:ss.ssssss" (default; L is the severity) or "YYYY-MM-DDThh:mm:ssZ L" (ISO8601), '
        "or are JSON objects (json).",
        parse=_choice("--log-format", "default", "ISO8601", "json"),
        metavar="default|ISO8601|json",
    )
    access_log: bool = _logging(
        "--access-log", False, "Log a line for each inference request, whatever levels are on.", kind=bool
    )
    log_file: str = _logging(
        "--log-file", "", "File that gets the log, instead of the console. Lines are appended to it."
    )

    model_repository: tuple[str, ...] = _repository(
        "--model-repository",
        (),
        "Path of a model repository. May be given more than once; a model that is in two of them is not served.",
        metavar="path",
        repeatable=True,
        check=_local_folders,
        aliases=("--model-store",),
    )
    exit_on_error: bool = _repository(
        "--exit-on-error", True, "Exit if a model cannot be loaded when the server starts.", kind=bool
    )
    repoagent_directory: str = _repository(
        "--repoagent-directory",
        "",
        "",
        metavar="path",
        unused="there are no repository agents, and models that name one are refused",
    )
    disable_auto_complete_config: bool = _repository(
        "--disable-auto-complete-config",
        False,
        "Do not complete model configurations from model files: a config.pbtxt with everything required must exist.",
        kind=bool,
        switch=True,
    )
    strict_readiness: bool = _repository(
        "--strict-readiness",
        True,
        "Whether /v2/health/ready needs all models to be available, or only a server that responds.",
        kind=bool,
    )
    model_control_mode: Literal["none", "poll", "explicit"] = _repository(
        "--model-control-mode",
        "none",
        "When models are loaded: all at the start (none); also when the repositories change (poll); or those named "
        "with --load-model at the start and others through the API (explicit).",
        parse=_choice("--model-control-mode", "none", "poll", "explicit"),
        metavar="none|poll|explicit",
    )
    repository_poll_secs: int = _repository(
        "--repository-poll-secs",
        15,
        "Seconds between two looks at the model repositories with --model-control-mode=poll. 0: look at the start only.",
        kind=int,
        check=_at_least(0),
    )
    load_model: tuple[str, ...] = _repository(
        "--load-model",
        (),
        "Model to load at the start with --model-control-mode=explicit; may be given more than once. A single '*' "
        "means all models; it is not a pattern.",
        metavar="name",
        repeatable=True,
    )
    model_config_name: str | None = _repository(
        "--model-config-name",
        None,
        "Use configs/<name>.pbtxt of a model, where there is one, in place of its config.pbtxt.",
        check=_config_name,
    )
    model_load_thread_count: int = _repository(
        "--model-load-thread-count", 4, "How many models are loaded at the same time.", kind=int, check=_at_least(1)
    )
    model_load_retry_count: int = _repository(
        "--model-load-retry-count",
        0,
        "How often loading a model is tried again after it failed.",
        kind=int,
        check=_at_least(0),
    )
    model_load_gpu_limit: tuple[tuple[int, float], ...] = _repository(
        "--model-load-gpu-limit",
        (),
        "The share of a GPU's memory, 0 to 1, above which an instance is not loaded: if, once it is there, more is in use, "
        "its model does not load. May be given once for each GPU. Needs NVML's Python module: pip install 'naiad[gpu]'.",
        parse=_share_of_device,
        metavar="<device_id>:<fraction>",
        repeatable=True,
        check=_shares,
    )
    strict_model_config: bool = _repository(
        "--strict-model-config", False, "Deprecated: use --disable-auto-complete-config.", kind=bool
    )

    allow_http: bool = _http("--allow-http", True, "Listen for HTTP requests.", kind=bool)
    http_address: str = _http("--http-address", "0.0.0.0", "Address that the HTTP server binds to.")
    http_port: int = _http("--http-port", 8000, "Port of the HTTP server.", kind=int, check=_port)
    reuse_http_port: bool = _http(
        "--reuse-http-port",
        False,
        "Share the HTTP port with other servers that have this option set, and the same models.",
        kind=bool,
    )
    http_header_forward_pattern: str = _http(
        "--http-header-forward-pattern",
        "",
        "Regular expression of the HTTP headers that become parameters of inference requests.",
        metavar="regex",
        check=_pattern,
    )
    http_thread_count: int = _http("--http-thread-count", 8, "", kind=int, check=_at_least(1), unused=_NO_THREADS)
    http_max_input_size: int = _http(
        "--http-max-input-size",
        67108864,
        "The most bytes of JSON, or of raw input, that one HTTP request may have.",
        kind=int,
        check=_at_least(1),
    )
    http_restricted_api: tuple[Restriction, ...] = _http(
        "--http-restricted-api",
        (),
        "Serve some APIs only to HTTP requests with a header <key>: <value>. APIs: " + ", ".join(API_CATEGORIES) + ".",
        parse=_restriction("--http-restricted-api"),
        metavar="api,...:key=value",
        repeatable=True,
        check=_one_group_each,
    )
    http_use_ssl: bool = _http("--http-use-ssl", False, "Serve HTTP over TLS.", kind=bool)
    http_use_ssl_mutual: bool = _http(
        "--http-use-ssl-mutual", False, "Serve HTTP over TLS and ask clients for a certificate.", kind=bool
    )
    http_server_cert: str = _http(
        "--http-server-cert", "", "File with the server's certificate (PEM), for TLS.", metavar="path"
    )
    http_server_key: str = _http("--http-server-key", "", "File with the server's key (PEM), for TLS.", metavar="path")
    http_root_cert: str = _http(
        "--http-root-cert", "", "File with the root certificate (PEM) of clients, for TLS.", metavar="path"
    )
    allow_client_shm: Literal["true", "false", "local"] = _http(
        "--allow-client-shm",
        "local",
        "Whether clients may register shared memory: all, none, or those on this machine (local).",
        parse=_client_shm,
        metavar="true|false|local",
    )

    allow_grpc: bool = _grpc("--allow-grpc", True, "Listen for gRPC requests.", kind=bool)
    grpc_address: str = _grpc("--grpc-address", "0.0.0.0", "Address that the gRPC server binds to.")
    grpc_port: int = _grpc("--grpc-port", 8001, "Port of the gRPC server.", kind=int, check=_port)
    reuse_grpc_port: bool = _grpc(
        "--reuse-grpc-port",
        False,
        "Share the gRPC port with other servers that have this option set, and the same models.",
        kind=bool,
    )
    grpc_header_forward_pattern: str = _grpc(
        "--grpc-header-forward-pattern",
        "",
        "Regular expression of the gRPC metadata that become parameters of inference requests.",
        metavar="regex",
        check=_pattern,
    )
    grpc_infer_thread_count: int = _grpc(
        "--grpc-infer-thread-count", 2, "", kind=int, check=_at_least(2, 128), unused=_NO_THREADS
    )
    grpc_infer_allocation_pool_size: int = _grpc(
        "--grpc-infer-allocation-pool-size",
        8,
        "",
        kind=int,
        unused="requests and responses are not pooled here",
    )
    grpc_max_response_pool_size: int | None = _grpc(
        "--grpc-max-response-pool-size", None, "", kind=int, unused="requests and responses are not pooled here"
    )
    grpc_use_ssl: bool = _grpc("--grpc-use-ssl", False, "Serve gRPC over TLS.", kind=bool)
    grpc_use_ssl_mutual: bool = _grpc(
        "--grpc-use-ssl-mutual", False, "Serve gRPC over TLS and ask clients for a certificate.", kind=bool
    )
    grpc_server_cert: str = _grpc(
        "--grpc-server-cert", "", "File with the server's certificate (PEM), for TLS.", metavar="path"
    )
    grpc_server_key: str = _grpc("--grpc-server-key", "", "File with the server's key (PEM), for TLS.", metavar="path")
    grpc_root_cert: str = _grpc(
        "--grpc-root-cert", "", "File with the root certificate (PEM) of clients, for TLS.", metavar="path"
    )
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = _grpc(
        "--grpc-infer-response-compression-level",
        "none",
        "How much inference responses are compressed for clients that accept it.",
        parse=_choice("--grpc-infer-response-compression-level", "none", "low", "medium", "high"),
        metavar="none|low|medium|high",
    )
    grpc_reflection: bool = _grpc(
        "--grpc-reflection",
        False,
        "Describe the services to clients that ask (server reflection), as grpcurl does.",
        kind=bool,
    )
    grpc_keepalive_time: int = _grpc(
        "--grpc-keepalive-time", 7200000, "Milliseconds after which a keepalive ping is sent.", kind=int
    )
    grpc_keepalive_timeout: int = _grpc(
        "--grpc-keepalive-timeout",
        20000,
        "Milliseconds that a keepalive ping waits for its answer before the connection is closed.",
        kind=int,
    )
    grpc_keepalive_permit_without_calls: bool = _grpc(
        "--grpc-keepalive-permit-without-calls",
        False,
        "Send keepalive pings even if there are no calls in flight.",
        kind=bool,
    )
    grpc_http2_max_pings_without_data: int = _grpc(
        "--grpc-http2-max-pings-without-data",
        2,
        "How many pings may be sent without data or headers between them. 0: any number.",
        kind=int,
    )
    grpc_http2_min_recv_ping_interval_without_data: int = _grpc(
        "--grpc-http2-min-recv-ping-interval-without-data",
        300000,
        "Milliseconds that clients must leave between pings without data; a faster one is a ping strike.",
        kind=int,
    )
    grpc_http2_max_ping_strikes: int = _grpc(
        "--grpc-http2-max-ping-strikes",
        2,
        "How many ping strikes a client may have before its connection is closed. 0: any number.",
        kind=int,
    )
    grpc_max_connection_age: int | None = _grpc(
        "--grpc-max-connection-age", None, "Milliseconds that a connection may exist. Default: no limit.", kind=int
    )
    grpc_max_connection_age_grace: int | None = _grpc(
        "--grpc-max-connection-age-grace",
        None,
        "Milliseconds that calls get to finish on a connection that reached its age. Default: no limit.",
        kind=int,
    )
    grpc_restricted_protocol: tuple[Restriction, ...] = _grpc(
        "--grpc-restricted-protocol",
        (),
        "Serve some protocols only to gRPC requests with the metadata triton-grpc-protocol-<key>: <value>. Protocols: "
        + ", ".join(API_CATEGORIES)
        + ".",
        parse=_restriction("--grpc-restricted-protocol"),
        metavar="protocol,...:key=value",
        repeatable=True,
        check=_one_group_each,
    )

    allow_metrics: bool = _metrics("--allow-metrics", True, "Serve Prometheus metrics.", kind=bool)
    allow_gpu_metrics: bool = _metrics("--allow-gpu-metrics", True, "Serve metrics of the GPUs too.", kind=bool)
    allow_cpu_metrics: bool = _metrics("--allow-cpu-metrics", True, "Serve metrics of CPU and memory too.", kind=bool)
    metrics_address: str = _metrics(
        "--metrics-address", "", "Address that the metrics server binds to. Default: the one of --http-address."
    )
    metrics_port: int = _metrics("--metrics-port", 8002, "Port of the metrics server.", kind=int, check=_port)
    metrics_interval_ms: float = _metrics(
        "--metrics-interval-ms",
        2000.0,
        "Milliseconds between two measurements of CPU, memory and GPUs.",
        kind=float,
        check=_more_than_zero,
    )
    metrics_config: tuple[tuple[str, str], ...] = _metrics(
        "--metrics-config",
        (),
        "A setting of the metrics: counter_latencies, summary_latencies (booleans), or "
        "summary_quantiles (<quantile>:<error>,...).",
        parse=_metrics_setting,
        metavar="setting=value",
        repeatable=True,
    )

    trace_config: tuple[Setting, ...] = _tracing(
        "--trace-config",
        (),
        "A setting of the traces: level, rate, count, mode; triton,file; triton,log-frequency; opentelemetry,url; "
        "opentelemetry,resource.",
        parse=_trace_setting,
        metavar="[mode,]setting=value",
        repeatable=True,
    )
    trace_file: str = _tracing("--trace-file", "", "Deprecated: use --trace-config=triton,file=<path>.", metavar="path")
    trace_level: tuple[Setting, ...] = _tracing(
        "--trace-level",
        (),
        "Deprecated: use --trace-config=level=<level>.",
        parse=_trace_level,
        metavar="OFF|TIMESTAMPS|TENSORS",
        repeatable=True,
    )
    trace_rate: int | None = _tracing("--trace-rate", None, "Deprecated: use --trace-config=rate=<number>.", kind=int)
    trace_count: int | None = _tracing(
        "--trace-count", None, "Deprecated: use --trace-config=count=<number>.", kind=int
    )
    trace_log_frequency: int | None = _tracing(
        "--trace-log-frequency", None, "Deprecated: use --trace-config=triton,log-frequency=<number>.", kind=int
    )

    backend_directory: str = _backends(
        "--backend-directory",
        "/opt/tritonserver/backends",
        "Directory with backends in subdirectories: <backend>/model.py serves the models that name the backend.",
        metavar="path",
    )
    environment_directory: str = _backends(
        "--environment-directory",
        "",
        "Where the Python environments that models bring along are kept. Default: the user's cache directory.",
        metavar="path",
    )
    model_requirements: bool = _backends(
        "--model-requirements",
        True,
        "Whether requirements.txt of a Python model is installed in an environment for it, or left alone.",
        kind=bool,
    )
    backend_config: tuple[BackendSetting, ...] = _backends(
        "--backend-config",
        (),
        "A setting of one backend, or of all where none is named. default-max-batch-size (4) is for all.",
        parse=_backend_setting,
        metavar="[backend,]setting=value",
        repeatable=True,
    )

    cache_config: tuple[Setting, ...] = _cache(
        "--cache-config",
        (),
        "A setting of a response cache, for example local,size=1048576.",
        parse=_cache_setting,
        metavar="cache,setting=value",
        repeatable=True,
    )

    cache_directory: str = _cache(
        "--cache-directory", "", "", metavar="path", unused="caches are part of the server, not libraries"
    )
    response_cache_byte_size: int | None = _cache(
        "--response-cache-byte-size", None, "Deprecated: use --cache-config=local,size=<number>.", kind=int
    )

    rate_limit: Literal["off", "execution_count"] = _rate(
        "--rate-limit",
        "off",
        "Whether instances wait for the resources their configuration names (execution_count) or not (off).",
        parse=_choice("--rate-limit", "off", "execution_count"),
        metavar="off|execution_count",
    )
    rate_limit_resource: tuple[RateLimitResource, ...] = _rate(
        "--rate-limit-resource",
        (),
        "How much of a resource there is, on one device or on each. Default: the most that an instance asks for.",
        parse=_rate_limit_resource,
        metavar="name:count[:device]",
        repeatable=True,
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            reason = option.check(getattr(self, name)) if option.check is not None else None
            if reason is not None:
                raise bad_option(option.flag, reason)
        if not self.model_repository:
            raise InvalidArgument("--model-repository must be specified")
        if self.cache_config and self.response_cache_byte_size is not None:
            raise InvalidArgument(
                "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. Please provide "
                "one or the other."
            )
        self._check_load_model()
        self._check_tls()
        self._check_ports()
        if self.frontends > 1 and self.allow_grpc and self.grpc_address.startswith("unix"):
            raise bad_option("--frontends", f"{self.frontends} processes cannot share {self.grpc_address}")

    def _check_load_model(self) -> None:
        if not self.load_model:
            return
        if self.model_control_mode != "explicit":
            raise InvalidArgument(
                "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
            )
        if "*" in self.load_model and len(set(self.load_model)) > 1:
            raise InvalidArgument("Wildcard model name '*' must be the ONLY startup model if specified at all.")

    def _check_tls(self) -> None:
        for protocol, prefix in (("gRPC", "grpc"), ("HTTP", "http")):
            mutual = getattr(self, f"{prefix}_use_ssl_mutual")
            if not (mutual or getattr(self, f"{prefix}_use_ssl")):
                continue
            for name in ("server_cert", "server_key", "root_cert") if mutual else ("server_cert", "server_key"):
                if not getattr(self, f"{prefix}_{name}"):
                    flag = f"--{prefix}-{name.replace('_', '-')}"
                    raise InvalidArgument(f"{protocol} over TLS needs {flag}=<path of a PEM file>")

    def _check_ports(self) -> None:
        doors = [
            (name, address, port)
            for name, allowed, address, port in (
                ("HTTP", self.allow_http, self.http_address, self.http_port),
                ("GRPC", self.allow_grpc, self.grpc_address, self.grpc_port),
                ("metrics", self.allow_metrics, self.metrics_bind_address, self.metrics_port),
            )
            if allowed and port != 0  # 0 lets the system choose a free one
        ]
        wildcards = ("0.0.0.0", "::")
        for index, (name, address, port) in enumerate(doors):
            for other, other_address, other_port in doors[:index]:
                same_address = address == other_address or address in wildcards or other_address in wildcards
                if port == other_port and same_address:
                    raise InvalidArgument(
                        f"The server cannot listen to {other} requests and {name} requests at the same address and "
                        f"port {other_address}:{port}"
                    )

    @property
    def metrics_bind_address(self) -> str:
        """Where the metrics server listens: `--metrics-address`, else the address of HTTP."""
        return self.metrics_address or self.http_address

    @property
    def auto_complete_config(self) -> bool:
        """Whether model configurations are completed from model files."""
        return not (self.disable_auto_complete_config or self.strict_model_config)

    @property
    def cache_settings(self) -> tuple[Setting, ...]:
        """The settings of the cache, whichever flag gives them."""
        if self.response_cache_byte_size is None:
            return self.cache_config
        return (Setting("local", "size", str(self.response_cache_byte_size)),)

    @property
    def trace_settings(self) -> tuple[Setting, ...]:
        """The settings of the deprecated flags, and after them, since the last one counts, those of --trace-config."""
        flags = (
            ("triton", "file", self.trace_file or None),
            ("", "rate", self.trace_rate),
            ("", "count", self.trace_count),
            ("triton", "log-frequency", self.trace_log_frequency),
        )
        given = tuple(Setting(scope, key, str(value)) for scope, key, value in flags if value is not None)
        return self.trace_level + given + self.trace_config

    @property
    def unused(self) -> dict[str, str]:
        """The flags that were given and have no effect: why each has none."""
        return {
            option.flag: option.unused
            for name, option in OPTIONS.items()
            if option.unused and getattr(self, name) != self.__dataclass_fields__[name].default
        }

    def backend_settings(self, backend: str) -> dict[str, str]:
        """The settings of `--backend-config` for one backend, above those for all, above the defaults."""
        settings = {"default-max-batch-size": "4"}
        for scope in ("", backend):
            settings.update({s.key: s.value for s in self.backend_config if s.backend == scope})
        return settings


#: Field name -> option, in the order of the help.
OPTIONS: dict[str, Option] = {field.name: field.metadata["option"] for field in dataclasses.fields(ServerOptions)}

#: Flags of Triton's server that this one does not have, and why: they are refused, because whoever gives them counts on
#: them. Those that only size what is not there are options, with `unused`.
REFUSED: dict[str, str] = {
    "--model-namespacing": "a model name must be unique across all repositories here",
    "--enable-peer-access": "the server does not copy between GPUs",
    "--allow-sagemaker": "there is no SageMaker endpoint",
    "--sagemaker-port": "there is no SageMaker endpoint",
    "--sagemaker-safe-port-range": "there is no SageMaker endpoint",
    "--sagemaker-thread-count": "there is no SageMaker endpoint",
    "--allow-vertex-ai": "there is no Vertex AI endpoint",
    "--vertex-ai-port": "there is no Vertex AI endpoint",
    "--vertex-ai-thread-count": "there is no Vertex AI endpoint",
    "--vertex-ai-default-model": "there is no Vertex AI endpoint",
    "--min-supported-compute-capability": "the frameworks of the backends decide which GPUs they support",
    "--host-policy": "models are not bound to NUMA nodes or cores",
}

#: Those of them that may be given as long as they ask for nothing.
REFUSED_WHERE_TRUE = ("--model-namespacing", "--enable-peer-access", "--allow-sagemaker", "--allow-vertex-ai")


def bad_option(flag: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f'Bad option: "{flag}".\n{reason}')


def parse_options(given: Mapping[str, Iterable[str]]) -> ServerOptions:
    """The options of a command line: field name -> the texts of its occurrences, in order.

    Of several occurrences of an option that is not repeatable the last one counts. Raises InvalidArgument.
    """
    values: dict[str, Any] = {}
    for name, texts in given.items():
        option = OPTIONS[name]
        try:
            parsed = [option.parse(text) for text in texts]
        except ValueError as error:
            raise bad_option(option.flag, str(error)) from None
        if parsed:
            values[name] = tuple(parsed) if option.repeatable else parsed[-1]
    return ServerOptions(**values)
