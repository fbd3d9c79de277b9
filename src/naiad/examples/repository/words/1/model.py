"""A decoupled model: sends the words of a text one by one."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.pause_s = float(parameters["pause_ms"]["string_value"]) / 1000

    def execute(self, requests):
        """Returns nothing: the responses go out through each request's sender, as soon as they are there."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.speak(request, sender)
            except UnicodeDecodeError as error:
                refusal = pb_utils.TritonError(f"text_input is not UTF-8: {error}", pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=refusal))
            # Without this the client would wait for more.
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def speak(self, request, sender):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().item().decode()
        limit = pb_utils.get_input_tensor_by_name(request, "max_tokens")  # None if it was left out
        words = text.split() if limit is None else text.split()[: max(0, limit.as_numpy().item())]
        for word in words:
            time.sleep(self.pause_s)
            if request.is_cancelled():  # the client has left
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([word.encode()], object))]))
