"""A CUDA runtime whose GPU is host memory; the fixture `cuda` puts it in place."""

import threading

#: Of the two allocations that clients have, of 64 bytes each.
HANDLE, OTHER = b"h" * 64, b"i" * 64


class FakeCuda:
    """A CUDA runtime whose device memory is a bytearray per handle. Calls wait for `free`, and end with `error`."""

    def __init__(self) -> None:
        self.memory = {HANDLE: bytearray(64), OTHER: bytearray(64)}
        self.open_handles: dict[int, bytes] = {}
        self.threads: set[str] = set()
        self.calls: list[str] = []
        self.free = threading.Event()
        self.free.set()
        self.error: OSError | None = None
        self.waiting = 0

    def begin(self, call: str) -> None:
        self.waiting += 1
        self.free.wait()
        self.waiting -= 1
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def open(self, device_id: int, raw_handle: bytes) -> int:
        self.begin("open")
        if raw_handle not in self.memory or device_id != 0:
            raise OSError(1, "invalid resource handle")
        address = 1000 * (1 + list(self.memory).index(raw_handle))
        self.open_handles[address] = raw_handle
        return address

    def allocated(self, address: int) -> int:
        return len(self.memory[self.open_handles[address]])

    def close(self, device_id: int, address: int) -> None:
        self.begin("close")
        del self.open_handles[address]

    def read(self, device_id: int, address: int, target: memoryview) -> None:
        self.begin("read")
        memory = self.memory[self.open_handles[address // 1000 * 1000]]
        target[:] = memory[address % 1000 :][: len(target)]

    def write(self, device_id: int, address: int, data: bytes) -> None:
        self.begin("write")
        memory = self.memory[self.open_handles[address // 1000 * 1000]]
        memory[address % 1000 : address % 1000 + len(data)] = data
