"""Backends that behave well and badly, named by "backends_for_tests:Class". Imported by zygotes, not by tests."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import numpy.random

from naiad.backends.api import ArrayBackend, BackendResponse, RequestBackend
from naiad.errors import InvalidArgument


class Identity(ArrayBackend):
    """OUTPUT<n> is INPUT<n>, doing first what the parameter `then` says."""

    def __init__(self, model, instance):
        self.model = model
        self.instance = instance
        if "fail" in model.parameters:
            raise RuntimeError(model.parameters["fail"])
        marker = model.parameters.get("crash_on_load_if")
        if marker and os.path.exists(marker):
            os._exit(9)

    @classmethod
    def autocomplete(cls, model):
        if "complete_fails" in model.parameters:
            raise InvalidArgument(model.parameters["complete_fails"])
        return {**model.config, "max_batch_size": np.int64(4) if "complete_oddly" in model.parameters else 4}

    def run(self, inputs, outputs):
        return {name.replace("INPUT", "OUTPUT"): array for name, array in inputs.items()}


class Misbehaving(Identity):
    """What it does is the first element of the first input, a string."""

    def run(self, inputs, outputs):
        command = np.ravel(inputs["INPUT0"])[0].decode()
        what, _, argument = command.partition(" ")
        result = inputs["INPUT0"]
        if what == "exit":
            os._exit(int(argument))
        elif what == "kill":
            os.kill(os.getpid(), int(argument))
            # It may be another thread that dies of it, a moment later.
            threading.Event().wait(20)
        elif what == "hang":
            threading.Event().wait()
        elif what == "raise":
            raise ValueError(argument)
        elif what == "refuse":
            raise InvalidArgument(argument)
        elif what == "leave":
            raise SystemExit(argument)
        elif what == "nothing":
            return {}
        elif what == "none":
            return None
        elif what == "list":
            return {"OUTPUT0": [b"x"]}
        elif what == "dtype":
            return {"OUTPUT0": np.zeros((1, 1), np.float32)}
        elif what == "scalar":
            return {"OUTPUT0": np.zeros((), object)}
        elif what == "rows":
            return {"OUTPUT0": np.array([[b"1"], [b"2"]], object)}
        elif what == "extra":
            return {"OUTPUT0": result, "OTHER": result}
        elif what == "wait":
            while not os.path.exists(argument):
                time.sleep(0.002)
        elif what == "big":
            result = np.full_like(result, b"x" * int(argument))
        elif what == "close_fds":
            os.closerange(3, 64)
        elif what == "argv":
            result = np.full_like(result, repr(sys.argv).encode())
        elif what == "who":
            result = np.full_like(
                result, f"{os.getpid()} {threading.current_thread() is threading.main_thread()}".encode()
            )
        elif what == "fork":
            if os.fork() == 0:
                # Holds all sockets of the host for longer than the host lives.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                while True:
                    time.sleep(60)
            os._exit(5)
        elif what == "allocate":
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
            np.zeros(2**33, np.uint8)
        elif what == "blas_threads":
            import ctypes

            with open("/proc/self/maps") as maps:
                path = next(line.split()[-1] for line in maps if "openblas" in line)
            result = np.full_like(result, str(ctypes.CDLL(path).scipy_openblas_get_num_threads64_()).encode())
        elif what == "random":
            result = np.full_like(result, str(numpy.random.rand()).encode())
        elif what == "meet":
            names = self.model.shared("names", list)
            names.append(argument)
            result = np.full_like(result, " ".join(names).encode())
        elif what == "environment":
            result = np.full_like(result, os.environ.get(argument, "unset").encode())
        return {"OUTPUT0": result}


class Processes(Misbehaving):
    instances_as = "processes"


class Meeting(Processes):
    """Loads end when `count` of them have begun, in the folder `place`; those of the instances `fail` fail then."""

    def __init__(self, model, instance):
        self.model = model
        place = Path(model.parameters["place"])
        (place / instance.name).touch()
        deadline = time.monotonic() + 20
        while len(list(place.iterdir())) < int(model.parameters["count"]):
            if time.monotonic() > deadline:
                raise RuntimeError("nobody else came")
            time.sleep(0.002)
        if instance.name in model.parameters.get("fail", "").split():
            raise InvalidArgument(model.parameters.get("text", instance.name + " is broken"))


class Echo(RequestBackend):
    """Answers each request with its inputs, and says in parameters what it has seen."""

    def __init__(self, model, instance):
        self.model = model

    def execute(self, requests):
        for request in requests:
            outputs = {name.replace("INPUT", "OUTPUT"): array for name, array in request.inputs.items()}
            seen = {
                "id": request.id,
                "outputs": ",".join(request.outputs),
                "correlation_id": request.correlation_id,
                "flags": request.flags,
                "priority": request.priority,
                "timeout_us": request.timeout_us,
                **request.parameters,
            }
            if "refuse" in request.parameters:
                request.send(InvalidArgument("refused"), True)
            elif "forget" not in request.parameters:
                request.send(BackendResponse(outputs, seen), True)


class Returning(RequestBackend):
    """Returns the inputs of each request."""

    def __init__(self, model, instance):
        pass

    def execute(self, requests):
        return [BackendResponse({"OUTPUT0": request.inputs["INPUT0"]}, {}) for request in requests]


class Remembering(RequestBackend):
    """Keeps the inputs of every request, and answers those of the one before."""

    def __init__(self, model, instance):
        self.kept = []

    def execute(self, requests):
        for request in requests:
            self.kept.append(request.inputs["INPUT0"])
            request.send(BackendResponse({"OUTPUT0": self.kept[max(0, len(self.kept) - 2)]}), True)


class Counting(RequestBackend):
    """Decoupled: as many responses as INPUT0 says, from a thread, after `execute` has returned."""

    def __init__(self, model, instance):
        pass

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _answer(self, request):
        count = int(np.ravel(request.inputs["INPUT0"])[0])
        size = int(np.ravel(request.inputs["INPUT0"])[1])
        if count < 0:
            while not request.is_cancelled():
                time.sleep(0.001)
            request.send(None, True)
            return
        for number in range(count):
            request.send(BackendResponse({"OUTPUT0": np.full((1, size), number, np.int32)}), False)
        request.send(None, True)


class Slow(Identity):
    def run(self, inputs, outputs):
        time.sleep(0.1)
        return {"OUTPUT0": inputs["INPUT0"]}


class NeedsFile(Misbehaving):
    def __init__(self, model, instance):
        with open(model.parameters["file"]):
            pass


class Readiness(Identity):
    """Is as ready as the parameter `answer` says; counts in the file `count` how often it was asked."""

    checks_readiness = True

    def is_ready(self):
        with open(self.model.parameters["count"], "a") as count:
            count.write(".")
        answer = self.model.parameters["answer"]
        if answer == "hang":
            threading.Event().wait(1000)
        if answer == "raise":
            raise InvalidArgument("cannot say")
        return answer == "yes"


class Closing(Identity):
    """Leaves its name where the parameter `trace` says when it is closed."""

    def close(self):
        with open(self.model.parameters["trace"], "a") as trace:
            trace.write(self.instance.name + "\n")


class Ragged(Identity):
    """All elements it got, for each request."""

    def run(self, inputs, outputs):
        assert inputs["INPUT0"].ndim == 1
        return {"OUTPUT0": np.tile(inputs["INPUT0"], (3, 1))}


class Doubling(Identity):
    """Twice the elements of all requests, in one dimension, where there are as many as it was told; the counts."""

    def run(self, inputs, outputs):
        assert inputs["INPUT0"].size == inputs["COUNTS"].sum()
        elements = inputs["INPUT0"]
        doubled = np.array([e + e for e in elements], object) if elements.dtype == object else elements * 2
        return {"OUTPUT0": doubled, "OUTPUT1": inputs["COUNTS"].reshape(-1, 1)}


class Picky(Identity):
    """Refuses a batch with a negative element."""

    def run(self, inputs, outputs):
        if (inputs["INPUT0"] < 0).any():
            raise InvalidArgument("a negative element")
        return {"OUTPUT0": inputs["INPUT0"], "OUTPUT1": np.full_like(inputs["INPUT0"], len(inputs["INPUT0"]))}


class Rendezvous(Identity):
    """Answers when three instances are in `run` at once."""

    def __init__(self, model, instance):
        self.barrier = model.shared("barrier", lambda: threading.Barrier(3, timeout=20))

    def run(self, inputs, outputs):
        self.barrier.wait()
        return {"OUTPUT0": inputs["INPUT0"]}


class Caller(Identity):
    """Asks the server for what its input says."""

    def run(self, inputs, outputs):
        method = inputs["INPUT0"][0].decode()
        self.model.services.log("INFO", f"calling {method}", "model.py", 7)
        answer = self.model.services.call(method, {"a": [1, 2.5, None]}, list)
        return {"OUTPUT0": np.array([str(answer).encode()], object)}


class MissingModule(Identity):
    modules = ("surely_not_installed",)
    extra = "sure"


class Rescheduling(RequestBackend):
    """Gives a request back until its second element, a number of times, is its correlation id. First element 1: in a
    thread, after `execute` has returned. 2: after it has answered."""

    def __init__(self, model, instance):
        self.rounds = {}

    def execute(self, requests):
        for request in requests:
            how, times = request.inputs["INPUT0"].ravel()
            done = self.rounds[request.correlation_id] = self.rounds.get(request.correlation_id, 0) + 1
            if how == 2:
                request.send(BackendResponse({"OUTPUT0": request.inputs["INPUT0"]}), True)
            if done > times and how != 2:
                request.send(BackendResponse({"OUTPUT0": np.full((1, 2), done, np.float32)}), True)
            elif how == 1:
                threading.Thread(target=request.reschedule).start()
            else:
                request.reschedule()


class Patient(Misbehaving):
    """Takes until the file `go_on` is there to be constructed; has begun when `begun` is."""

    def __init__(self, model, instance):
        Path(model.parameters["begun"]).touch()
        while not os.path.exists(model.parameters["go_on"]):
            time.sleep(0.002)
