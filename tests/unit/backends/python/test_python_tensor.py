import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from naiad.backends.python import dlpack
from naiad.backends.python.pb_utils import Tensor, TritonModelException
from naiad.backends.python.tensor import host_array

DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


def test_an_array_is_kept_as_it_is() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor("X", array)
    assert tensor.as_numpy() is array
    assert tensor.name() == "X"
    assert tensor.shape() == [2, 3]
    assert tensor.triton_dtype() == 11
    assert tensor.is_cpu()
    assert repr(tensor) == "<Tensor X [2, 3]>"


def test_an_array_not_in_c_order_is_copied_into_it() -> None:
    tensor = Tensor("X", np.arange(6).reshape(2, 3).T)
    assert tensor.as_numpy().flags.c_contiguous
    assert tensor.as_numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


def test_foreign_byte_order_becomes_ours() -> None:
    array = Tensor("X", np.array([1, 2], ">i4")).as_numpy()
    assert array.dtype.isnative
    assert array.tolist() == [1, 2]


@pytest.mark.parametrize("array", [np.array(["a", "bc"]), np.array([b"a", b"bc"]), np.array([b"a", "bc"], object)])
def test_text_and_bytes_are_bytes(array: np.ndarray) -> None:
    assert Tensor("X", array).triton_dtype() == 13


def test_what_is_no_tensor() -> None:
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor("", np.zeros(1))
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor.from_dlpack("", np.zeros(1))
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        Tensor("X", np.zeros(1, np.complex64))
    with pytest.raises(TypeError, match=r"Tensor 'X' needs a numpy\.ndarray, got <class 'list'>"):
        Tensor("X", [1, 2])  # type: ignore[arg-type]


def test_bf16_goes_by_dlpack_only() -> None:
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    tensor = Tensor("X", values)
    with pytest.raises(TritonModelException, match="Tensor dtype is BF16 and cannot be converted to NumPy"):
        tensor.as_numpy()
    again = Tensor.from_dlpack("Y", tensor)
    assert again.triton_dtype() == 14
    assert host_array(again).dtype == ml_dtypes.bfloat16
    assert host_array(again).tolist() == values.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_capsule", [True, False])
@pytest.mark.parametrize("writeable", [True, False])
def test_dlpack_shares_memory(dtype: str, by_capsule: bool, writeable: bool) -> None:
    array = np.array([[0, 1, 0], [1, 1, 0]], dtype)
    array.flags.writeable = writeable
    tensor = Tensor("X", array)
    again = Tensor.from_dlpack("Y", tensor.to_dlpack() if by_capsule else tensor)
    assert again.as_numpy().dtype == array.dtype
    assert again.as_numpy().tolist() == array.tolist()
    assert np.shares_memory(again.as_numpy(), array)


def test_a_capsule_keeps_its_tensor() -> None:
    # Triton's own test model counts references.
    tensor = Tensor("x", np.zeros(2, np.float32))
    before = sys.getrefcount(tensor)
    capsule = tensor.to_dlpack()
    assert sys.getrefcount(tensor) == before + 1
    del capsule
    assert sys.getrefcount(tensor) == before


def test_numpy_reads_a_tensor_by_dlpack() -> None:
    tensor = Tensor("X", np.arange(3, dtype=np.int16))
    assert np.from_dlpack(tensor).tolist() == [0, 1, 2]
    assert tensor.__dlpack_device__() == (1, 0)


def test_memory_outlives_its_makers() -> None:
    capsule = Tensor("X", np.full(1000, 7, np.int64)).to_dlpack()
    tensor = Tensor.from_dlpack("Y", capsule)
    del capsule
    assert set(tensor.as_numpy().tolist()) == {7}


def test_what_dlpack_cannot_carry() -> None:
    with pytest.raises(TritonModelException, match=r"^DLPack does not have support for string tensors\.$"):
        Tensor("X", np.array([b"a"], object)).to_dlpack()
    with pytest.raises(TritonModelException, match=r"^DLPack tensor is not contiguous\. Only contiguous"):
        Tensor.from_dlpack("X", np.arange(6).reshape(2, 3).T)
    with pytest.raises(TritonModelException, match="Provided tensor is not supported"):
        Tensor.from_dlpack("X", [1])
    with pytest.raises(TritonModelException, match="DLPack data type with code 5, 64 bits and 1 lanes"):
        Tensor.from_dlpack("X", np.zeros(1, np.complex64))


def test_devices_dlpack_knows_and_we_do_not() -> None:
    class Elsewhere:
        def __dlpack__(self, **options: object) -> object:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            return (10, 0)

    with pytest.raises(TritonModelException, match=r"^DLDevice type 10 is not support by Python backend\.$"):
        Tensor.from_dlpack("X", Elsewhere())


class OnGpu:
    """Says of host memory that it is on GPU 3."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.streams: list[int | None] = []

    def __dlpack__(self, *, stream: int | None) -> object:
        self.streams.append(stream)
        capsule = dlpack.from_array(self.array, None)
        tensor = dlpack._inside(capsule)
        tensor.device_type, tensor.device_id = 2, 3
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)


def test_a_tensor_on_a_gpu_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    source = OnGpu(np.arange(6, dtype=np.float16).reshape(2, 3))
    tensor = Tensor.from_dlpack("X", source)
    assert not tensor.is_cpu()
    assert tensor.shape() == [2, 3]
    assert tensor.triton_dtype() == 10
    assert tensor.__dlpack_device__() == (2, 3)
    with pytest.raises(TritonModelException, match="Tensor is stored in GPU and cannot be converted to NumPy"):
        tensor.as_numpy()
    again = Tensor.from_dlpack("Y", tensor.to_dlpack())
    assert again.__dlpack_device__() == (2, 3)

    copies = []

    def copy(array: np.ndarray, address: int, device_id: int) -> None:
        import ctypes

        copies.append(device_id)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    monkeypatch.setattr(dlpack, "_copy_from_gpu", copy)
    assert host_array(tensor).tolist() == host_array(again).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies == [3, 3]
    # The copy needs no other capsule. All on the legacy default stream; whoever works on another one is made to wait for
    # what wrote the tensor.
    assert source.streams == [1, 1]
    for stream in None, 7:
        tensor.__dlpack__(stream=stream)
    assert source.streams == [1, 1, 1, 7]


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, ml_dtypes.bfloat16])
def test_a_capsule_of_a_gpu_makes_others_of_the_same_memory(dtype: type) -> None:
    values = np.arange(4).astype(dtype).reshape(2, 2)
    tensor = Tensor.from_dlpack("X", OnGpu(values).__dlpack__(stream=1))
    for _ in range(2):
        capsule = tensor.to_dlpack()
        inside = dlpack._inside(capsule)
        assert (inside.device_type, inside.device_id, inside.data) == (2, 3, values.ctypes.data)
        again = Tensor.from_dlpack("Y", tensor)
        assert (again.shape(), again.triton_dtype()) == (tensor.shape(), tensor.triton_dtype())


def test_pytorch_is_asked_on_the_gpu_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its tensors refuse to be exported elsewhere."""
    current = [0]

    class OnGpuOfTorch(OnGpu):
        def __dlpack__(self, *, stream: int | None) -> object:
            if current[-1] != 3:
                raise BufferError("Can't export tensors on a different CUDA device index.")
            return super().__dlpack__(stream=stream)

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current.append(number)
        yield
        current.pop()

    torch = SimpleNamespace(Tensor=OnGpuOfTorch, cuda=SimpleNamespace(device=device))
    monkeypatch.setitem(sys.modules, "torch", torch)
    tensor = Tensor.from_dlpack("X", OnGpuOfTorch(np.zeros(3, np.float32)))
    tensor.to_dlpack()
    tensor.__dlpack__(stream=7)
    assert current == [0]


@pytest.mark.parametrize("name", [None, 1])
def test_a_name_that_is_no_string_is_a_type_error(name: object) -> None:
    with pytest.raises(TypeError):
        Tensor(name, np.zeros(1))  # type: ignore[arg-type]
