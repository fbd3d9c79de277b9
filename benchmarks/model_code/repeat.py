import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """As many responses as INPUT0 says, each with its number: what a language model's tokens look like to a server."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for index in range(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().item()):
                output = pb_utils.Tensor("OUTPUT0", np.array([index], np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
