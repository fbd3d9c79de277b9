"""The server's side of zygotes: one per backend environment, started when needed and again when it has died.

Lives on the event loop. Knows how to begin and end host processes and how they ended, not what is in them.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

import naiad
from naiad.errors import InvalidArgument, Unavailable
from naiad.instances.channel import LoopChannel, socket_pair
from naiad.instances.frames import Exited, Fork, Forked, FromZygote, Hello, Start
from naiad.instances.zygote import SAVED_OPENBLAS

#: Importing a framework from a cold disk can take minutes, but not for ever.
_START_TIMEOUT_S = 300.0
#: A fork takes milliseconds; longer where memory has to come back from disk first.
_FORK_TIMEOUT_S = 20.0
#: A zygote gives its hosts 2 s.
_END_TIMEOUT_S = 3.0
#: Makes a zygote of an interpreter that need not have naiad: the server lends it what it misses, at the end of the
#: path, where the compiled modules of the server are also those of that interpreter.
_BORROW = """
import os, runpy, sys
if (saved := os.environ.pop("NAIAD_SAVED_LD_LIBRARY_PATH", None)) is not None:
    os.environ["LD_LIBRARY_PATH"] = saved
version, *lent = sys.argv.pop().split("\\n")
if version == "%d.%d" % sys.version_info[:2]:
    sys.path += [entry for entry in lent if entry not in sys.path]
runpy.run_module("naiad.instances.zygote", run_name="__main__", alter_sys=True)
"""
#: Starts "${@:2}" as Triton starts models in environments: "$1", which sets what their packages want, has run, and their
#: libraries are found before others. Programs that models start shall not have these, but LD_LIBRARY_PATH as it was; the
#: process itself goes by what it began with. On EXIT, since "$1" may well end the shell.
_ACTIVATE = """
naiad_activate=$1 naiad_command=("${@:2}")
set --
trap '
    naiad_status=$? naiad_lib=${naiad_activate%/bin/activate}/lib
    trap - EXIT
    if [ $naiad_status != 0 ]; then
        echo "$naiad_activate failed with status $naiad_status; models in its Python environment start all the same" >&2
    fi
    NAIAD_SAVED_LD_LIBRARY_PATH=${LD_LIBRARY_PATH-} LD_LIBRARY_PATH=$naiad_lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
        exec "${naiad_command[@]}"
' EXIT
source "$naiad_activate"
exit
"""
_PROBE = """
import importlib.util, sys
print("%d.%d" % sys.version_info[:2], importlib.util.find_spec("naiad") is not None)
"""
_OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

#: How long after a host's end the zygote may take to say how it ended.
_STATUS_TIMEOUT_S = 1.0


def _lent() -> list[str]:
    """The folders of naiad and of what it needs."""
    installed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    return [str(Path(naiad.__file__).parent.parent), *installed]


def _command(interpreter: str, *arguments: str) -> list[str]:
    """Starts another interpreter than the server's, in its environment as it is when it is activated."""
    activate = Path(interpreter).with_name("activate")
    if activate.is_file() and (bash := shutil.which("bash")) is not None:
        return [bash, "-c", _ACTIVATE, "bash", str(activate), interpreter, *arguments]
    return [interpreter, *arguments]


def exit_text(status: int, by_signal: bool) -> str:
    """How a process ended, for example "was killed by signal 9 (SIGKILL; out of memory?)"."""
    if not by_signal:
        return f"exited with code {status}"
    try:
        name = signal.Signals(status).name
    except ValueError:
        name = "unknown"
    hint = "; out of memory?" if status == signal.SIGKILL else ""
    return f"was killed by signal {status} ({name}{hint})"


class Child:
    """A host process. `on_end(how)` is called once when it has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pid: int, pidfd: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.on_end: Callable[[str], None] | None = None
        self._loop = loop
        self._pidfd = pidfd
        self._status: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pidfd, self._on_exit)

    @property
    def is_alive(self) -> bool:
        return self._pidfd >= 0

    def kill(self) -> None:
        """SIGKILL; the end is reported as any other. Sure to hit this process and no other."""
        if self._pidfd >= 0:
            # It may have ended, and the zygote have waited for it, without the loop having come to see that.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def status(self, text: str) -> None:
        """The zygote says how the process ended; before or after the end is seen here."""
        self._status = text
        if self._timer is not None:
            self._timer.cancel()
            self._report()

    async def wait(self) -> None:
        """Until it has ended and `on_end` was called."""
        await asyncio.shield(self._ended)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._status is not None:
            self._report()
        else:
            self._timer = self._loop.call_later(_STATUS_TIMEOUT_S, self._report)

    def _report(self) -> None:
        self._timer = None
        if not self._ended.done():
            self._ended.set_result(None)
            if self.on_end is not None:
                self.on_end(self._status or "ended")


class _Zygote:
    """One zygote process and what it was asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, backend: str, reference: str, interpreter: str) -> None:
        self.hello: asyncio.Future[Hello] = loop.create_future()
        self.forks: dict[int, tuple[asyncio.Future[Child], socket.socket]] = {}
        self.children: dict[int, Child] = {}
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._backend = backend
        self._interpreter = interpreter
        mine, theirs = socket_pair()
        environment = dict(os.environ)
        environment[SAVED_OPENBLAS] = environment.get("OPENBLAS_NUM_THREADS", "")
        environment["OPENBLAS_NUM_THREADS"] = "1"
        command = [interpreter, "-P", "-m", "naiad.instances.zygote", str(theirs.fileno()), backend]
        if interpreter != sys.executable:
            borrowed = "\n".join([_OWN_VERSION, *_lent()])
            command = _command(interpreter, "-P", "-c", _BORROW, str(theirs.fileno()), backend, borrowed)
            # Programs that models start are those of the environment, also where nothing activates it.
            environment["PATH"] = f"{Path(interpreter).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
            try:
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
        except OSError as error:
            mine.close()
            raise Unavailable(f"cannot start '{interpreter}' for backend '{backend}': {error.strerror}") from error
        finally:
            theirs.close()
        loop.add_reader(self._pidfd, self._on_exit)
        decoder: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)
        self._channel = LoopChannel(loop, mine, decoder, self._on_message, self._on_end)
        path = list(sys.path) if interpreter == sys.executable else None
        self._channel.send(Start(backend, reference, path))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._channel.is_open

    def fork(self, number: int, name: str, exclusive: bool, busy_poll_ns: int) -> "asyncio.Future[Child]":
        mine, theirs = socket_pair()
        forked: asyncio.Future[Child] = self._loop.create_future()
        self.forks[number] = (forked, mine)
        self._channel.send(Fork(number, name, exclusive, busy_poll_ns), (theirs.fileno(),))
        theirs.close()
        return forked

    def close(self) -> None:
        """It ends its children, and itself, when the socket ends; but while it imports it does not look."""
        if not self.hello.done():
            self._process.kill()
        self._channel.close()
        self._fail("has been closed")

    def give_up(self, reason: str) -> None:
        """Ends one that hangs. Its hosts live on."""
        self._process.kill()
        self._channel.close()
        self._fail(reason)

    async def wait(self) -> None:
        """Until it has ended after `close`: by force where it hangs, and then its hosts too."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self.kill_children()
            self._process.kill()
            await asyncio.shield(self.ended)

    def kill_children(self) -> None:
        for child in self.children.values():
            child.kill()

    def _on_message(self, message: FromZygote, fds: list[int]) -> None:
        if isinstance(message, Hello):
            if not self.hello.done():
                self.hello.set_result(message)
        elif isinstance(message, Exited):
            if (child := self.children.pop(message.pid, None)) is not None:
                child.status(exit_text(message.status, message.by_signal))
        else:
            self._on_forked(message, fds)

    def _on_forked(self, message: Forked, fds: list[int]) -> None:
        forked, control = self.forks.pop(message.reply)
        if message.failure is not None:
            control.close()
            if not forked.done():
                forked.set_exception(message.failure.error())
            return
        child = Child(self._loop, message.pid, fds[0], control)
        self.children[message.pid] = child
        if forked.done():
            # Whoever asked was cancelled: nobody will ever talk to this host.
            control.close()
        else:
            forked.set_result(child)

    def _on_end(self, reason: str | None) -> None:
        self._fail(reason or "has ended")

    def _fail(self, reason: str) -> None:
        error = Unavailable(f"the process that imports backend '{self._backend}' {reason}")
        if not self.hello.done():
            if self._interpreter != sys.executable:
                error = Unavailable(
                    f"{error.message}; its Python environment is that of {self._interpreter}. What it said is in the"
                    " server's log."
                )
            self.hello.set_exception(error)
            self.hello.exception()
        for forked, control in self.forks.values():
            control.close()
            if not forked.done():
                forked.set_exception(error)
        self.forks.clear()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._channel.drain()
        self._channel.close()
        self._fail(exit_text(abs(code), code < 0))
        self.ended.set_result(None)


class BackendEnvironment:
    """A backend in an interpreter: what it is, and hosts that have it imported."""

    def __init__(self, backend: str, reference: str, interpreter: str, warn: Callable[[str], None]) -> None:
        self.backend = backend
        self.reference = reference
        self.interpreter = interpreter
        #: How many models are opened in it, and have been.
        self.models = 0
        self.opened = 0
        self._warn = warn
        self._zygote: _Zygote | None = None
        self._ending: list[_Zygote] = []
        self._fork_count = 0
        self._is_known = interpreter == sys.executable

    @property
    def pid(self) -> int | None:
        """The zygote's process id while it lives."""
        return self._zygote.pid if self._zygote is not None and self._zygote.is_alive else None

    async def start(self) -> Hello:
        """Starts the zygote unless it lives. Raises NaiadError: unknown backend, missing or broken import."""
        if not self._is_known:
            await self._probe()
            self._is_known = True
        return await self._hello(self._living_zygote())

    async def fork(self, name: str, exclusive: bool, busy_poll_ns: int) -> Child:
        """A new host process, named for ps. Raises NaiadError."""
        zygote = self._living_zygote()
        await self._hello(zygote)
        self._fork_count += 1
        forked = zygote.fork(self._fork_count, name, exclusive, busy_poll_ns)
        await asyncio.wait((forked,), timeout=_FORK_TIMEOUT_S)
        if not forked.done():
            zygote.give_up(f"has not started a process for '{name}' within {_FORK_TIMEOUT_S:g} s and was killed")
        return await forked

    def kill(self) -> None:
        """Ends all hosts by force."""
        for zygote in [*self._ending, self._zygote]:
            if zygote is not None:
                zygote.kill_children()

    async def close(self) -> None:
        """Ends the zygote, and with it hosts that are still there."""
        if self._zygote is not None:
            self._zygote.close()
            self._ending.append(self._zygote)
            self._zygote = None
        await asyncio.gather(*(zygote.wait() for zygote in self._ending))
        self._ending.clear()

    async def _probe(self) -> None:
        """Raises InvalidArgument for an interpreter that cannot run naiad, neither its own nor the server's."""
        try:
            # Not by the loop, which forks: gRPC's library would log that it does not like that.
            process = await asyncio.to_thread(
                subprocess.run,
                _command(self.interpreter, "-c", _PROBE),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                check=False,
            )
        except OSError as error:
            raise Unavailable(
                f"cannot start '{self.interpreter}' for backend '{self.backend}': {error.strerror}"
            ) from error
        said = process.stdout.decode(errors="replace").strip()
        version, _, has_naiad = said.rpartition("\n")[2].partition(" ")
        if process.returncode != 0:
            raise InvalidArgument(f"'{self.interpreter}' is no Python that works: {said}")
        if version != _OWN_VERSION and has_naiad != "True":
            raise InvalidArgument(
                f"backend '{self.backend}' cannot run in the Python environment of {self.interpreter}: that is Python "
                f"{version}, the server is Python {_OWN_VERSION} and can lend its packages to the same version only. Make "
                f"the environment with Python {_OWN_VERSION}, or install naiad in it"
            )

    def _living_zygote(self) -> _Zygote:
        zygote = self._zygote
        if zygote is None or not zygote.is_alive:
            if zygote is not None:
                self._ending = [old for old in [*self._ending, zygote] if not old.ended.done()]
            loop = asyncio.get_running_loop()
            zygote = self._zygote = _Zygote(loop, self.backend, self.reference, self.interpreter)
        return zygote

    async def _hello(self, zygote: _Zygote) -> Hello:
        first = not zygote.hello.done()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                hello = await asyncio.shield(zygote.hello)
        except TimeoutError:
            zygote.close()
            raise Unavailable(
                f"backend '{self.backend}' has not finished importing within {_START_TIMEOUT_S:g} s"
            ) from None
        if hello.failure is not None:
            raise hello.failure.error()
        if first and hello.threads > 1:
            self._warn(
                f"backend '{self.backend}' started {hello.threads - 1} threads while it was imported; "
                "they do not exist in its hosts"
            )
        return hello
