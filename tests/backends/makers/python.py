"""Python models: a model.py says everything, and nothing about them can be known but by running it."""

from pathlib import Path
from typing import ClassVar

from makers import ALL, Maker
from naiad.datatypes import DataType

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {complete}
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.answers(request)) for request in requests]

    def answers(self, request):
        def array(name):
            return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

        return [pb_utils.Tensor(name, value) for name, value in {answers}.items()]
"""
COMPLETE = """if config.as_dict()["input"]:
            return config
        for name in ("INPUT0", "INPUT1"):
            config.add_input({{"name": name, "data_type": "TYPE_FP32", "dims": [4]}})
        for name in ("OUTPUT0", "OUTPUT1"):
            config.add_output({{"name": name, "data_type": "TYPE_FP32", "dims": [4]}})
        config.set_max_batch_size({max_batch_size})
        {scheduler}"""


def write(path: Path, answers: str, complete: str = "pass") -> None:
    path.write_text(MODEL.format(answers=answers, complete=complete))


class PythonMaker(Maker):
    backend = "python"
    requires = ("naiad.backends.python",)
    filename = "model.py"
    datatypes: ClassVar[frozenset[DataType]] = ALL - {DataType.BF16}  # reach Python models through DLPack only
    checks_signature = False
    has_scalars = False

    def add_sub(self, path: Path, batching: bool) -> None:
        scheduler = "config.set_dynamic_batching()" if batching else ""
        complete = COMPLETE.format(max_batch_size=4 if batching else 0, scheduler=scheduler)
        sums = '{"OUTPUT0": array("INPUT0") + array("INPUT1"), "OUTPUT1": array("INPUT0") - array("INPUT1")}'
        write(path, sums, complete)

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        write(path, '{"OUTPUT0": array("INPUT0")}')

    def failing(self, path: Path) -> None:
        write(path, '{"OUTPUT0": array("INPUT0").reshape(2, 3)}')
