"""PyTorch models: TorchScript, archives of torch.export, and a model.py with its weights."""

import textwrap
import warnings
from pathlib import Path
from typing import Any

from makers import ALL, Maker
from naiad.datatypes import DataType


def save_script(path: Path, source: str, name: str = "Model") -> None:
    """The class `name` of `source`, scripted. TorchScript wants the source in a file."""
    import importlib.util

    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.parent.parent / f"{path.parent.parent.name}_source.py"
    file.write_text("import torch\nfrom typing import *\nfrom torch import Tensor\n\n" + textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still what people have
        torch.jit.script(getattr(module, name)().eval()).save(str(path))


def save_exported(path: Path, module: Any, args: tuple[Any, ...], dynamic: Any = None, **kwargs: Any) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, args, kwargs, dynamic_shapes=dynamic), path)


def save_module(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("import torch\nfrom torch import Tensor\n\n" + textwrap.dedent(source))


TENSORS = ALL - {DataType.BYTES}

ADD_SUB = """
    class Model(torch.nn.Module):
        def forward(self, INPUT0: Tensor, INPUT1: Tensor):
            return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}
"""
IDENTITY = """
    class Model(torch.nn.Module):
        def forward(self, INPUT0: Tensor):
            return INPUT0
"""
SCALAR = """
    class Model(torch.nn.Module):
        def forward(self, INPUT0: Tensor):
            return INPUT0.sum() * 2
"""
RESHAPE = """
    class Model(torch.nn.Module):
        def forward(self, INPUT0: Tensor):
            return INPUT0.reshape(2, 3)
"""


class TorchScriptMaker(Maker):
    backend = "pytorch"
    requires = ("torch",)
    filename = "model.pt"
    text_only = True
    completes = False
    checks_signature = False

    def add_sub(self, path: Path, batching: bool) -> None:
        save_script(path, ADD_SUB)

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        text = "List[" * (len(dims) + 1) + "str" + "]" * (len(dims) + 1)
        save_script(path, IDENTITY if datatype is not DataType.BYTES else IDENTITY.replace("Tensor", text))

    def scalar(self, path: Path) -> None:
        save_script(path, SCALAR)

    def failing(self, path: Path) -> None:
        save_script(path, RESHAPE)


class ModuleMaker(TorchScriptMaker):
    filename = "model.py"

    def add_sub(self, path: Path, batching: bool) -> None:
        save_module(path, ADD_SUB)

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        text = "list[" * (len(dims) + 1) + "str" + "]" * (len(dims) + 1)
        save_module(path, IDENTITY if datatype is not DataType.BYTES else IDENTITY.replace("Tensor", text))

    def scalar(self, path: Path) -> None:
        save_module(path, SCALAR)

    def failing(self, path: Path) -> None:
        save_module(path, RESHAPE)


class ExportedMaker(Maker):
    backend = "pytorch"
    requires = ("torch",)
    filename = "model.pt2"
    datatypes = TENSORS

    def add_sub(self, path: Path, batching: bool) -> None:
        import torch

        class Model(torch.nn.Module):
            def forward(self, INPUT0: Any, INPUT1: Any) -> Any:
                return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}

        x = torch.ones((3, 4) if batching else (4,))
        batch = {0: torch.export.Dim("batch")} if batching else None
        save_exported(path, Model(), (x, x.clone()), {"INPUT0": batch, "INPUT1": batch})

    def identity(self, path: Path, datatype: DataType, dims: tuple[int, ...]) -> None:
        import torch

        from naiad.backends.pytorch.tensors import TORCH_TYPES

        class Model(torch.nn.Module):
            def forward(self, INPUT0: Any) -> Any:
                return {"OUTPUT0": INPUT0.clone()}

        x = torch.ones((3, *(5 if dim == -1 else dim for dim in dims))).to(TORCH_TYPES[datatype])
        dynamic = {at: torch.export.Dim.DYNAMIC for at, dim in enumerate((-1, *dims)) if dim == -1}
        save_exported(path, Model(), (x,), {"INPUT0": dynamic})

    def scalar(self, path: Path) -> None:
        import torch

        class Model(torch.nn.Module):
            def forward(self, INPUT0: Any) -> Any:
                return {"OUTPUT0": INPUT0 * 2}

        save_exported(path, Model(), (torch.tensor(1.0),))

    def failing(self, path: Path) -> None:
        import torch

        class Model(torch.nn.Module):
            def forward(self, INPUT0: Any) -> Any:
                return {"OUTPUT0": INPUT0.reshape(2, 3)}

        save_exported(path, Model(), (torch.ones(6),))
