"""Tensors to and from torch, as models exchange them: by DLPack, without copies."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from python_backend_fakes import FakeRequest, load, write

from naiad.backends.python.pb_utils import Tensor, TritonModelException
from naiad.backends.python.tensor import host_array

torch = pytest.importorskip("torch")
from_dlpack = pytest.importorskip("torch.utils.dlpack").from_dlpack
to_dlpack = pytest.importorskip("torch.utils.dlpack").to_dlpack

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_capsule", [True, False])
def test_both_ways(dtype: str, by_capsule: bool) -> None:
    ours = Tensor("X", np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype))
    theirs = from_dlpack(ours.to_dlpack() if by_capsule else ours)
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert theirs.data_ptr() == ours.as_numpy().ctypes.data
    again = Tensor.from_dlpack("Y", to_dlpack(theirs) if by_capsule else theirs)
    assert again.as_numpy().dtype == ours.as_numpy().dtype
    assert again.as_numpy().tolist() == ours.as_numpy().tolist()
    assert again.as_numpy().ctypes.data == theirs.data_ptr()


def test_bf16_both_ways() -> None:
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    theirs = from_dlpack(Tensor("X", values).to_dlpack())
    assert theirs.dtype == torch.bfloat16
    assert theirs.tolist() == [1.5, -2.0]
    ours = Tensor.from_dlpack("Y", theirs * 2)
    assert ours.triton_dtype() == 14
    assert host_array(ours).tolist() == [3.0, -4.0]


def test_a_tensor_of_torch_lives_as_long_as_ours() -> None:
    ours = Tensor.from_dlpack("X", torch.full((100_000,), 7))
    for _ in range(10):
        torch.full((100_000,), 1)
    assert set(ours.as_numpy().tolist()) == {7}


def test_views_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(TritonModelException, match="DLPack tensor is not contiguous"):
        Tensor.from_dlpack("X", torch.zeros(2, 3).T)


def test_a_model_of_torch(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import torch
        from torch.utils.dlpack import from_dlpack, to_dlpack

        class TritonPythonModel:
            def execute(self, requests):
                responses = []
                for request in requests:
                    x = from_dlpack(pb_utils.get_input_tensor_by_name(request, "X").to_dlpack())
                    y = pb_utils.Tensor.from_dlpack("Y", to_dlpack(torch.nn.functional.relu(x)))
                    responses.append(pb_utils.InferenceResponse([y]))
                return responses
        """,
    )
    request = FakeRequest(("Y",), X=np.array([[-1, 2]], np.float32))
    load(path).execute([request])
    assert request.values == {"Y": [[0.0, 2.0]]}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_gpu_reaches_the_host() -> None:
    theirs = torch.arange(6, device="cuda", dtype=torch.float32).reshape(2, 3) * 2
    ours = Tensor.from_dlpack("X", theirs)
    assert not ours.is_cpu()
    assert ours.__dlpack_device__() == (2, theirs.device.index)
    assert host_array(ours).tolist() == theirs.tolist()
    assert from_dlpack(ours.to_dlpack()).data_ptr() == theirs.data_ptr()
