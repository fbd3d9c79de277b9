"""A zygote: has imported one backend and forks hosts from it. `python -m naiad.instances.zygote FD BACKEND`.

It never starts a thread, since fork keeps only one of them: OpenBLAS, which starts its threads on import, is told not
to through OPENBLAS_NUM_THREADS, by the server, for the time of the imports; each host gives it back its threads. Other
libraries start theirs at their first use, which is in a host, and are left alone: OMP_NUM_THREADS read at import would
stay with the hosts. The zygote is the parent of the hosts, so it says how they ended; when the server ends, they do.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from typing import Any

import msgspec

from naiad.backends.api import RequestBackend
from naiad.instances import cuda_driver, host
from naiad.instances.busy_poll import BusyPoll
from naiad.instances.channel import BlockingChannel
from naiad.instances.frames import Exited, Fork, Forked, Hello, Start, ToZygote, failure
from naiad.instances.process_name import name_process
from naiad.instances.references import load_backend

#: Set by the server for a zygote, holding what the variable was before ("" for nothing).
SAVED_OPENBLAS = "NAIAD_SAVED_OPENBLAS_NUM_THREADS"
#: How long hosts may take to see the end of the server before they are killed.
_GRACE_S = 2.0


def _openblas_setters() -> list[Any]:
    """The functions that set the number of threads of each OpenBLAS in this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].rstrip("\n") for line in maps if "openblas" in line}
    setters = []
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if (setter := getattr(library, name, None)) is not None:
                setters.append(setter)
                break
    return setters


def _restore_openblas_environment() -> str:
    """The value of OPENBLAS_NUM_THREADS as the user has it, "" for none; it is in the environment again."""
    saved = os.environ.pop(SAVED_OPENBLAS, "")
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    if saved:
        os.environ["OPENBLAS_NUM_THREADS"] = saved
    return saved


def _end_group(pid: int) -> None:
    """Ends what a host that has ended, and was not waited for yet, has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Zygote:
    """The forking process. `children` are its hosts: pidfd -> pid."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel: BlockingChannel[ToZygote] = BlockingChannel(sock, msgspec.msgpack.Decoder(ToZygote))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._children: dict[int, int] = {}
        self._backend: type[Any] | None = None
        self._openblas: list[Any] = []
        self._openblas_threads = 0

    def run(self) -> None:
        """Until the server ends."""
        received = self._channel.receive()
        if received is None or not isinstance(received[0], Start) or not self._start(received[0]):
            return
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                    continue
                received = self._channel.receive()
                if received is None:
                    self._end_children()
                    return
                while received is not None:
                    if isinstance(received[0], Fork):
                        self._fork(received[0], received[1][0])
                    received = self._channel.received()

    def _start(self, start: Start) -> bool:
        if start.path is not None:
            sys.path[:] = start.path
        try:
            backend = load_backend(start.backend, start.reference)
            uses_gpus = backend.uses_gpus()
        except BaseException as error:
            self._channel.send(Hello("threads", False, False, 0, failure(error)))
            return False
        if cuda_driver.is_started():
            print(
                f"naiad: importing the backend '{start.backend}' has started CUDA, which does not survive a fork: its models"
                " will fail on GPUs. Its module, or one that it imports, should use CUDA only when a model is loaded",
                file=sys.stderr,
                flush=True,
            )
        self._backend = backend
        saved = _restore_openblas_environment()
        self._openblas = _openblas_setters()
        self._openblas_threads = int(saved) if saved.isdigit() else len(os.sched_getaffinity(0))
        # Collected once, then left alone: a collection in a host would copy the pages of all objects.
        gc.collect()
        gc.freeze()
        threads = len(os.listdir("/proc/self/task"))
        takes_requests = issubclass(backend, RequestBackend)
        self._channel.send(Hello(backend.instances_as, takes_requests, uses_gpus, threads, None))
        return True

    def _fork(self, fork: Fork, control: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            os.close(control)
            problem = failure(OSError(f"cannot fork a host: {error.strerror}"))
            self._channel.send(Forked(fork.reply, 0, problem))
            return
        if pid == 0:
            self._become_host(fork, control)
        os.close(control)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._channel.send(Forked(fork.reply, pid, None), (pidfd,))

    def _become_host(self, fork: Fork, control: int) -> None:
        try:
            # What a model starts is of this group, and ends with the host.
            os.setpgid(0, 0)
            self._channel.close()
            for pidfd in self._children:
                os.close(pidfd)
            name_process(f"naiad:{fork.name}")
            if (random := sys.modules.get("numpy.random")) is not None:
                # Else all hosts draw the same numbers; Python's own generator sees to that itself.
                random.seed()
            for setter in self._openblas:
                setter(self._openblas_threads)
            assert self._backend is not None
            host.main(socket.socket(fileno=control), self._backend, fork.exclusive, BusyPoll(fork.busy_poll_ns))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        _end_group(self._children[pidfd])
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        if result is not None:
            self._channel.send(Exited(pid, result.si_status, result.si_code != os.CLD_EXITED))

    def _end_children(self) -> None:
        """They see the end of the server themselves; those that cannot are killed."""
        deadline = time.monotonic() + _GRACE_S
        self._poll.unregister(self._channel.sock)
        while self._children:
            left_ms = (deadline - time.monotonic()) * 1000
            ended = [fd for fd, _ in self._poll.poll(max(left_ms, 0))]
            if not ended:
                for pidfd in self._children:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                deadline = time.monotonic() + 60
            for pidfd in ended:
                _end_group(self._children[pidfd])
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
                self._poll.unregister(pidfd)
                del self._children[pidfd]


def main() -> None:
    """The program."""
    fd, backend = int(sys.argv[1]), sys.argv[2]
    # Model code sees what an embedded interpreter has: `unittest.main` and argparse would take ours as theirs.
    sys.argv[:] = [""]
    host.ignore_signals()
    name_process(f"naiad-{backend}")
    zygote = Zygote(socket.socket(fileno=fd))
    try:
        zygote.run()
    except (BrokenPipeError, ConnectionResetError):
        zygote._end_children()


if __name__ == "__main__":
    main()
