import dataclasses
import re

import pytest

from naiad.errors import InvalidArgument
from naiad.options import (
    OPTIONS,
    REFUSED,
    BackendSetting,
    RateLimitResource,
    Restriction,
    ServerOptions,
    Setting,
    parse_options,
    parse_quantiles,
)


def options(**given: list[str]) -> ServerOptions:
    return parse_options({"model_repository": ["/models"], **given})


def test_defaults_are_tritons():
    chosen = options()
    assert (chosen.id, chosen.http_port, chosen.grpc_port, chosen.metrics_port) == ("triton", 8000, 8001, 8002)
    assert (chosen.model_control_mode, chosen.repository_poll_secs, chosen.exit_timeout_secs) == ("none", 15, 30)
    assert chosen.strict_readiness
    assert chosen.exit_on_error
    assert chosen.auto_complete_config
    assert chosen.http_max_input_size == 64 * 1024 * 1024
    assert chosen.allow_client_shm == "local"
    assert chosen.execution_timeout_secs == 600


def test_every_field_has_an_option_and_its_flag_is_its_name():
    for field in dataclasses.fields(ServerOptions):
        assert OPTIONS[field.name].flag == "--" + field.name.replace("_", "-")
        assert OPTIONS[field.name].repeatable == (field.default == ())


def test_deprecated_flags_of_the_trace_are_settings_below_those_of_trace_config():
    chosen = options(
        trace_file=["/t.json"],
        trace_level=["TIMESTAMPS", "TENSORS"],
        trace_rate=["5"],
        trace_count=["7"],
        trace_log_frequency=["9"],
        trace_config=["rate=6"],
    )
    assert [(setting.scope, setting.key, setting.value) for setting in chosen.trace_settings] == [
        ("", "level", "TIMESTAMPS"),
        ("", "level", "TENSORS"),
        ("triton", "file", "/t.json"),
        ("", "rate", "5"),
        ("", "count", "7"),
        ("triton", "log-frequency", "9"),
        ("", "rate", "6"),
    ]
    assert options().trace_settings == ()


def test_the_cache_by_its_older_flag():
    assert options(response_cache_byte_size=["8192"]).cache_settings == (Setting("local", "size", "8192"),)
    assert options(cache_config=["local,size=1"]).cache_settings == (Setting("local", "size", "1"),)
    assert options().cache_settings == ()
    with pytest.raises(InvalidArgument, match="Incompatible flags --response-cache-byte-size and --cache-config"):
        options(response_cache_byte_size=["8192"], cache_config=["local,size=1"])


def test_no_flag_is_said_twice():
    flags = [flag for option in OPTIONS.values() for flag in (option.flag, *option.aliases)]
    assert len(flags) == len(set(flags))
    assert not set(flags) & REFUSED.keys()


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), ("ON", True), ("1", True), ("false", False), ("off", False), ("0", False)],
)
def test_booleans(text, value):
    assert options(allow_metrics=[text]).allow_metrics is value


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("model_repository", ["/a", "/b"], ("/a", "/b")),
        ("http_port", ["80", "81"], 81),
        ("log_verbose", ["true"], 1),
        ("log_verbose", ["false"], 0),
        ("log_verbose", ["3"], 3),
        ("metrics_interval_ms", ["0.5"], 0.5),
        ("allow_client_shm", ["Local"], "local"),
        ("allow_client_shm", ["1"], "true"),
        ("allow_client_shm", ["off"], "false"),
        ("model_config_name", ["h100"], "h100"),
        ("cuda_memory_pool_byte_size", ["0:67108864", "1:0:5"], ((0, 67108864), (1, 0))),
        ("model_load_gpu_limit", ["0:0.5", "1:1"], ((0, 0.5), (1, 1.0))),
        ("model_control_mode", ["EXPLICIT"], "explicit"),
        ("rate_limit", ["Execution_Count"], "execution_count"),
        ("log_format", ["iso8601"], "ISO8601"),
        ("grpc_max_connection_age", ["1000"], 1000),
        (
            "http_restricted_api",
            ["health,metadata:key=a=b"],
            (Restriction(frozenset({"health", "metadata"}), "key", "a=b"),),
        ),
        ("backend_config", ["onnxruntime,threads=2"], (BackendSetting("onnxruntime", "threads", "2"),)),
        ("backend_config", ["default-max-batch-size=8"], (BackendSetting("", "default-max-batch-size", "8"),)),
        ("backend_config", ["path=/a,/b"], (BackendSetting("", "path", "/a,/b"),)),
        ("metrics_config", ["summary_latencies=true"], (("summary_latencies", "true"),)),
    ],
)
def test_values(name, texts, value):
    assert getattr(options(**{name: texts}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("trace_config", "rate=5", Setting("", "rate", "5")),
        ("trace_config", "triton,file=/t.json", Setting("triton", "file", "/t.json")),
        ("trace_config", "level=TIMESTAMPS", Setting("", "level", "TIMESTAMPS")),
        ("trace_config", "mode=OpenTelemetry", Setting("", "mode", "opentelemetry")),
        ("cache_config", "local,size=1048576", Setting("local", "size", "1048576")),
        ("rate_limit_resource", "R1:4", RateLimitResource("R1", 4)),
        ("rate_limit_resource", "R1:4:2", RateLimitResource("R1", 4, 2)),
    ],
)
def test_values_of_options_that_may_be_off(name, text, value):
    assert OPTIONS[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("allow_http", "maybe", 'Bad option: "--allow-http".\ninvalid value for bool option: maybe'),
        ("allow_http", "", "invalid value for bool option: "),
        ("http_port", "abc", 'Bad option: "--http-port".\nInvalid option value. Got abc'),
        ("http_port", "1x", "Invalid option value. Got 1x"),
        ("http_port", "99999", "expected 0 to 65535, got 99999"),
        ("exit_timeout_secs", "-3", "expected 0 or more, got -3"),
        ("log_format", "zz", "invalid argument for --log-format: 'zz'; expected one of default, ISO8601, json"),
        ("model_control_mode", "sometimes", "invalid argument for --model-control-mode"),
        ("grpc_infer_response_compression_level", "extreme", "expected one of none, low, medium, high"),
        ("http_restricted_api", "everything:a=b", "unknown restricted api 'everything'"),
        ("http_restricted_api", "health", "format is '<config name>:<setting>=<value>'. Got health"),
        ("http_restricted_api", "health:a", "Got health:a"),
        ("http_restricted_api", "health:=a", "Got health:=a"),
        ("http_restricted_api", "health:a=", "Got health:a="),
        ("backend_config", "onnx", "format is '<backend name>,<setting>=<value>'. Got onnx"),
        ("backend_config", "onnx,a", "Got onnx,a"),
        ("backend_config", ",a=b", "No backend specified."),
        ("metrics_config", "a", "--metrics-config option format is <setting>=<value>. Got a"),
        (
            "cache_config",
            "local,size",
            "--cache-config option format is '<cache name>,<setting>=<value>'. Got local,size",
        ),
        ("cache_config", "local", "--cache-config option format is <cache name>,<setting>=<value>. Got local"),
        ("metrics_config", "latencies=true", "unknown metrics setting 'latencies'"),
        ("metrics_config", "counter_latencies=maybe", "invalid value for bool option: maybe"),
        ("metrics_config", "summary_quantiles=0.5", "for example 0.5:0.05. Got 0.5"),
        ("metrics_config", "summary_quantiles=2:0.5", "from 0 to 1. Got 2:0.5"),
        ("metrics_config", "histogram_latencies=true", "histogram_latencies is not supported"),
        ("model_config_name", "", "Error: empty argument for --model-config-name"),
        ("model_config_name", "a b", "without spaces"),
        ("http_header_forward_pattern", "(", "'(' is not a regular expression"),
        ("grpc_infer_thread_count", "1", "expected 2 to 128, got 1"),
        ("http_max_input_size", "0", "expected 1 or more, got 0"),
        ("frontends", "0", "expected 1 to 256, got 0"),
        ("model_repository", "s3://bucket/models", "'s3://bucket/models' is not a folder: copy the models to one"),
        ("cuda_memory_pool_byte_size", "5", "requires format <first>:<second>. Found: 5"),
        ("cuda_memory_pool_byte_size", "x:1", "Invalid option value. Got x"),
        ("model_load_gpu_limit", "0", "requires format <first>:<second>. Found: 0"),
        ("model_load_gpu_limit", "0:1.5", "expects limit fraction to be in range [0.0, 1.0], got 1.500000"),
        ("model_load_gpu_limit", "-1:1", "expects device ID >= 0, got -1"),
        ("metrics_interval_ms", "0", "expected more than 0"),
        ("metrics_interval_ms", "x", "Invalid option value. Got x"),
    ],
)
def test_wrong_values_are_named(name, text, message):
    with pytest.raises(InvalidArgument) as caught:
        parse_options({"model_repository": ["/models"], name: [text]})
    assert message in caught.value.message
    assert OPTIONS[name].flag in caught.value.message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace_config", "level=NO", "invalid value for trace level option: no"),
        ("trace_config", "zzz,a=1", 'invalid value for trace mode option: zzz. Available options are "triton"'),
        ("trace_config", "rate=x", "Invalid option value. Got x"),
        ("trace_level", "NO", "invalid value for trace level option: no"),
        ("trace_config", "foo", "Got foo"),
        ("cache_config", "local", "No cache specified."),
        ("cache_config", "local,size", "Got local,size"),
        ("rate_limit", "bad", "invalid argument for --rate-limit"),
        ("rate_limit_resource", "R", "'<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got R"),
        ("rate_limit_resource", "R:x", "Invalid option value. Got x"),
    ],
)
def test_wrong_values_of_options_that_may_be_off(name, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OPTIONS[name].parse(text)


def test_a_repository_is_needed():
    with pytest.raises(InvalidArgument, match="--model-repository must be specified"):
        ServerOptions()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"load_model": ("a",)},
            "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
        (
            {"load_model": ("*", "a"), "model_control_mode": "explicit"},
            "Wildcard model name '*' must be the ONLY startup model if specified at all.",
        ),
        (
            {"http_port": 8001},
            "The server cannot listen to HTTP requests and GRPC requests at the same address and port 0.0.0.0:8001",
        ),
        ({"metrics_port": 8000, "http_address": "127.0.0.1"}, "HTTP requests and metrics requests"),
        ({"grpc_port": 8000, "http_address": "127.0.0.1"}, "at the same address and port 127.0.0.1:8000"),
        ({"frontends": 2, "grpc_address": "unix:/tmp/x"}, "2 processes cannot share unix:/tmp/x"),
        ({"grpc_use_ssl": True}, "gRPC over TLS needs --grpc-server-cert"),
        ({"http_use_ssl": True}, "HTTP over TLS needs --http-server-cert"),
        ({"http_use_ssl_mutual": True, "http_server_cert": "c", "http_server_key": "k"}, "needs --http-root-cert"),
        ({"grpc_use_ssl_mutual": True, "grpc_server_cert": "c", "grpc_server_key": "k"}, "needs --grpc-root-cert"),
        (
            {
                "http_restricted_api": (
                    Restriction(frozenset({"health"}), "a", "b"),
                    Restriction(frozenset({"health"}), "c", "d"),
                )
            },
            "restricted api 'health' can not be specified in multiple config groups",
        ),
    ],
)
def test_options_that_contradict_each_other(given, message):
    with pytest.raises(InvalidArgument) as caught:
        ServerOptions(model_repository=("/models",), **given)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "given",
    [
        {"load_model": ("*",), "model_control_mode": "explicit"},
        {"http_port": 8001, "allow_grpc": False},
        {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        {"http_port": 9000, "http_address": "127.0.0.1", "grpc_port": 9000, "grpc_address": "127.0.0.2"},
    ],
)
def test_options_that_go_together(given):
    ServerOptions(model_repository=("/models",), **given)


def test_metrics_listen_where_http_does_unless_told_otherwise():
    assert options(http_address=["127.0.0.1"]).metrics_bind_address == "127.0.0.1"
    assert options(metrics_address=["::1"]).metrics_bind_address == "::1"


@pytest.mark.parametrize("given", [{"disable_auto_complete_config": ["true"]}, {"strict_model_config": ["true"]}])
def test_both_ways_to_turn_completion_off(given):
    assert not options(**given).auto_complete_config


def test_backend_settings_of_one_backend_are_above_those_for_all():
    chosen = options(backend_config=["python,a=1", "a=0", "b=2", "default-max-batch-size=8", "other,b=9"])
    assert chosen.backend_settings("python") == {"default-max-batch-size": "8", "a": "1", "b": "2"}
    assert options().backend_settings("python") == {"default-max-batch-size": "4"}


def test_quantiles():
    assert parse_quantiles("0.5:0.05,0.9:0.01") == ((0.5, 0.05), (0.9, 0.01))
    assert parse_quantiles("0.1:0.0.1, .7x:1e-2") == ((0.1, 0.0), (0.7, 0.01))


def test_what_has_no_effect_is_taken_and_told():
    given = options(
        cuda_memory_pool_byte_size=["0:0"],
        buffer_manager_thread_count=["2"],
        pinned_memory_pool_byte_size=["268435456"],
        http_thread_count=["16"],
        grpc_max_response_pool_size=["10"],
        repoagent_directory=["/opt/tritonserver/repoagents"],
        cache_directory=["/opt/tritonserver/caches"],
        exit_timeout_secs=["5"],
    )
    assert set(given.unused) == {
        "--cuda-memory-pool-byte-size",
        "--buffer-manager-thread-count",
        "--http-thread-count",
        "--grpc-max-response-pool-size",
        "--repoagent-directory",
        "--cache-directory",
    }
    assert options().unused == {}
