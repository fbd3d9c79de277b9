"""Backends that meet errors of CUDA, named by "cuda_backends:Class", on a driver that is none. Imported by zygotes."""

import os
import threading

import numpy as np

from naiad.backends.api import ArrayBackend, BackendResponse, RequestBackend
from naiad.errors import Internal
from naiad.instances import cuda_driver


class Driver:
    """libcuda with one GPU, on which all calls end with `code`."""

    def __init__(self, code):
        self.code = code

    def __getattr__(self, name):
        # Each function once: its `argtypes` are set.
        def call(*arguments):
            values = [getattr(argument, "_obj", argument) for argument in arguments]
            if name == "cuDeviceGetCount":
                values[0].value = 1
            elif name == "cuDevicePrimaryCtxGetState":
                values[2].value = 1
            elif name == "cuGetErrorName":
                values[1].value = b"CUDA_ERROR_%d" % values[0]
            elif name == "cuMemGetInfo_v2":
                return self.code
            return 0

        return setattr(self, name, call) or call


def meet(text):
    """What a command "<code of the driver> <error text>" asks for; 0 and no text is that all is well."""
    code, _, message = text.partition(" ")
    if code.isdigit():
        driver = Driver(int(code))
        cuda_driver.loaded_driver = lambda: driver
    return message


class Arrays(ArrayBackend):
    """Raises what the first input says. OUTPUT0 is the process id."""

    def __init__(self, model, instance):
        if "fail" in model.parameters:
            raise RuntimeError(meet(model.parameters["fail"]))

    def run(self, inputs, outputs):
        message = meet(np.ravel(inputs["INPUT0"])[0].decode())
        if message:
            raise RuntimeError(message)
        return {"OUTPUT0": np.full_like(inputs["INPUT0"], str(os.getpid()).encode())}


class Requests(RequestBackend):
    """As `Arrays`; answers as the parameter `how` says."""

    def __init__(self, model, instance):
        self.how = model.parameters.get("how", "raise")

    def execute(self, requests):
        for request in requests:
            message = meet(request.inputs["INPUT0"].ravel()[0].decode())
            if not message:
                result = BackendResponse({"OUTPUT0": np.array([str(os.getpid()).encode()], object)})
            elif self.how == "raise":
                raise RuntimeError(message)
            else:
                result = Internal(message)
            if self.how == "late":
                threading.Thread(target=request.send, args=(result, True)).start()
            elif self.how == "return":
                return [result]
            else:
                request.send(result, True)
        return None


class Early(Arrays):
    """Starts CUDA where it is imported."""

    @classmethod
    def uses_gpus(cls):
        meet("0")
        return False
