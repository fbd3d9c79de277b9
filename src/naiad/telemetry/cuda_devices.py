"""Prints the UUIDs of the GPUs that CUDA sees, in its order, one a line. Imports nothing of naiad: `gpus` runs the file in
a process of its own, since a process that has asked CUDA cannot fork any more.
"""

import ctypes
import sys
import uuid

_NO_DEVICE = 100


def main() -> str | None:
    """What went wrong, None if nothing did."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count, device = ctypes.c_int(), ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code not in (0, _NO_DEVICE):
        return f"error {code} of CUDA"
    for number in range(count.value):
        whole, part = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), number)
        cuda.cuDeviceGetUuid(whole, device)
        # Of a part of a GPU the older function gives the UUID of the GPU. The newer one came with CUDA 11.4.
        getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)(part, device)
        kind = "GPU" if bytes(whole) == bytes(part) else "MIG"
        print(f"{kind}-{uuid.UUID(bytes=bytes(part))}")
    return None


if __name__ == "__main__":
    sys.exit(main())
