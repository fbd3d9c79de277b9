"""A front-end process: `python -m naiad.frontends.processes.program NUMBER SOCKET REQUESTS RESPONSES`.

Its ordinary front ends serve an engine that is in another process, the parent. It ends when that one says so or is no
more; signals that a terminal or a service manager sends to all processes are the parent's business.
"""

import asyncio
import os
import socket
import sys

import uvloop

from naiad.errors import NaiadError
from naiad.frontends.listening import HttpService, Listening, listen, settle
from naiad.frontends.processes.client import (
    EngineClient,
    EngineConnection,
    ForwardedMethod,
    ReportingLog,
    management,
)
from naiad.frontends.processes.frames import HttpConnections, Started, failure_of
from naiad.instances.host import ignore_signals
from naiad.instances.process_name import name_process
from naiad.telemetry.log import bridge

#: How long clients may take to hear that the engine's process has ended.
_GRACE_S = 2.0
#: How often the connections are counted when no new ones are taken.
_COUNT_S = 0.05


async def _serve(sock: socket.socket, requests_fd: int, responses_fd: int) -> None:
    connection = EngineConnection(sock, requests_fd, responses_fd)
    log = ReportingLog(connection)
    bridge(log)
    try:
        options = (await connection.start).options
    except NaiadError:
        return  # the parent has ended, or has no use for this process any more
    async with Listening() as listening:
        try:
            await listen(
                listening,
                options,
                http_engine=EngineClient(connection, over_http=True),
                grpc_engine=EngineClient(connection, over_http=False),
                regions=connection.regions,
                traces=connection.traces,
                log=log,
                management=management(connection),
                method=lambda path: ForwardedMethod(connection, path),
            )
        except NaiadError as error:
            connection.tell(Started(failure_of(error)))
            return
        settle()
        connection.tell(Started(None))
        refusing = asyncio.ensure_future(_refuse(connection, listening.http))
        await connection.stop.wait()
        refusing.cancel()
        if connection.is_lost:
            asyncio.get_running_loop().call_later(_GRACE_S, os._exit, 1)


async def _refuse(connection: EngineConnection, http: HttpService | None) -> None:
    """When the engine's process says so: takes no new HTTP connections and tells how many there still are."""
    await connection.refuse.wait()
    told = -1
    if http is not None:
        await http.refuse()
    while told:
        count = 0 if http is None else http.connection_count
        if count != told:
            told = count
            connection.tell(HttpConnections(count))
        await asyncio.sleep(_COUNT_S)


def main() -> None:
    """The program."""
    number, *fds = map(int, sys.argv[1:])
    ignore_signals()
    name_process(f"naiad-frontend{number}")
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        uvloop.run(_serve(socket.socket(fileno=fds[0]), *fds[1:]))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    # Threads of libraries that wait for something do not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
