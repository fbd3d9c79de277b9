"""Compiles the modules of the hot path with mypyc where there is a C compiler; without one they run as they are.

NAIAD_COMPILE=0 leaves them as they are, NAIAD_COMPILE=1 fails where they cannot be compiled. An editable install is not
compiled unless asked for: what is edited would not be what runs.
"""

import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.build import build

#: What a request passes on its way. Compiled classes cannot be subclassed by modules that are not, unless they say so.
HOT_PATH = (
    "backends/python/backend",
    "backends/python/request",
    "backends/python/response",
    "backends/python/sender",
    "backends/python/tensor",
    "engine",
    "frontends/access",
    "frontends/connections",
    "frontends/grpc/calls",
    "frontends/grpc/connection",
    "frontends/grpc/frames",
    "frontends/grpc/head",
    "frontends/grpc/inference_stream",
    "frontends/grpc/reflection",
    "frontends/grpc/server",
    "frontends/grpc/servicer",
    "frontends/grpc/stream",
    "frontends/http/app",
    "frontends/http/connection",
    "frontends/http/head",
    "frontends/http/inference",
    "frontends/processes/client",
    "instances/busy_poll",
    "instances/call_link",
    "instances/channel",
    "instances/delivery",
    "instances/execution",
    "instances/instance",
    "instances/layout",
    "instances/process_instance",
    "messages",
    "model_calls",
    "models/check",
    "models/model",
    "packed",
    "protocol/json_arrays",
    "protocol/json_codec",
    "protocol/json_numbers",
    "protocol/json_templates",
    "protocol/json_text",
    "protocol/outputs",
    "protocol/proto_codec",
    "protocol/served",
    "protocol/templates",
    "scheduling/dynamic",
    "scheduling/ensemble",
    "scheduling/queue",
    "scheduling/returns",
    "scheduling/scheduler",
    "scheduling/sequence",
    "scheduling/slots",
    "scheduling/turns",
    "statistics",
    "telemetry/access_lines",
    "telemetry/quantiles",
)


def compiled() -> list[Extension]:
    wanted = os.environ.get("NAIAD_COMPILE", "")
    commands = {"bdist_wheel", "build_ext"} | ({"editable_wheel"} if wanted else set())
    if wanted == "0" or not commands & set(sys.argv):
        return []
    # Types are `make check`'s business, with everything installed; here most of what is imported is not.
    options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    try:
        from mypyc.build import mypycify

        files = [f"src/naiad/{name}.py" for name in HOT_PATH]
        extensions = mypycify([*options, *files], opt_level="2", debug_level="0", group_name="naiad")
    except (Exception, SystemExit) as error:
        if wanted:
            raise
        print(f"warning: the hot path is not compiled: {error!r}", file=sys.stderr)
        return []
    for extension in extensions:
        extension.optional = not wanted
    return extensions


class FreshBuild(build):
    """A build from nothing: what an earlier one compiled for another list of modules would be installed with it."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(ext_modules=compiled(), cmdclass={"build": FreshBuild})
