"""Unloading gives everything back: memory, processes, descriptors."""

import os
from pathlib import Path

from served import until

from naiad.examples import write_example

ROUNDS = 100 if os.environ.get("NAIAD_SLOW_TESTS") else 30
#: The first rounds fill pools that stay.
WARM = 10


def resident_kib(pid):
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


def descriptors(pids):
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


def test_memory_after_many_rounds_is_that_after_the_first(explicit):
    write_example(explicit.repository.path)
    client = explicit.http
    server = explicit.process.pid
    seen = []
    for number in range(1, ROUNDS + 1):
        client.load("digits")
        assert client.is_model_ready("digits")
        client.unload("digits")
        until(lambda: client.index()["digits", "1"] == ("UNAVAILABLE", "unloaded"), "it is unloaded")
        until(lambda: not explicit.named("naiad:digits"), "the host has ended")
        if number >= WARM:
            (zygote,) = explicit.named("naiad-onnxruntime")
            files = descriptors((server, zygote))
            seen.append((resident_kib(server), resident_kib(zygote), files, len(explicit.pids())))
    first, last = seen[0], seen[-1]
    print(f"after {WARM} rounds {first}, after {ROUNDS} {last}: KiB of server and zygote, descriptors, processes")
    assert last[0] <= first[0] * 1.02
    assert last[1] <= first[1] * 1.02
    assert last[3] == first[3]
    # The last connection of the client may not have been closed yet.
    until(
        lambda: all(now <= then for now, then in zip(descriptors((server, zygote)), first[2], strict=True)),
        "as many files",
    )
