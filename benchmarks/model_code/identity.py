import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with what it is asked: what is measured is the server."""

    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return responses
