"""Asks a small classifier first, and a larger one about the images that the small one is not sure of."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

SMALL, LARGE = "digits_linear", "digits"


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.sure = float(parameters["sure"]["string_value"])

    async def execute(self, requests):
        """A coroutine may be used in place of a function, so that other requests go on while this one waits."""
        return await asyncio.gather(*map(self.answer, requests))

    async def answer(self, request):
        images = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        try:
            probabilities = await ask(SMALL, images)
            labels = probabilities.argmax(axis=1)
            models = np.full(len(images), SMALL, np.object_)
            unsure = probabilities.max(axis=1) < self.sure
            if unsure.any():
                labels[unsure] = (await ask(LARGE, images[unsure])).argmax(axis=1)
                models[unsure] = LARGE
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("LABEL", labels.astype(np.int64).reshape(-1, 1)),
                pb_utils.Tensor("MODEL", models.reshape(-1, 1)),
            ]
        )


async def ask(model, images):
    """The probabilities that another model of this server gives to the digits, [images, 10]."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=["PROBABILITIES"],
        inputs=[pb_utils.Tensor("IMAGE", images)],
    )
    response = await request.async_exec()
    if response.has_error():
        raise pb_utils.TritonModelException(f"asking '{model}' has failed: {response.error().message()}")
    return pb_utils.get_output_tensor_by_name(response, "PROBABILITIES").as_numpy()
