import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The sum of INPUT0 over each sequence."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            value, start, end, ready, sequence = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
                for name in ("INPUT0", "START", "END", "READY", "SEQUENCE")
            )
            total = 0
            if ready:  # else it stands for a sequence that has nothing to ask now
                total = value if start else self.sums[sequence] + value
                self.sums[sequence] = total
                if end:
                    del self.sums[sequence]
            output = pb_utils.Tensor("OUTPUT0", np.array([[total]], np.int32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
