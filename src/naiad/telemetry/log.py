"""The server's log, in Triton's formats, and its settings that clients can read and change.

A server has one `Log`. Lines go to stdout (info) or stderr (warnings, errors), or all to
a file. Called on the event loop, and by library threads through `bridge`; a line is one write, but for those of the
access log, which come together. Nothing else on the way of a request logs; who logs verbosely asks `log.verbose_level`
first.
"""

import json
import logging
import os
import stat
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from types import FrameType
from typing import Any, Literal, TextIO

from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable, Unsupported

Level = Literal["ERROR", "WARNING", "INFO", "VERBOSE"]

#: The settings clients see, in the order of Triton's answers, and the type of each.
SETTINGS: dict[str, type] = {
    "log_file": str,
    "log_info": bool,
    "log_warning": bool,
    "log_error": bool,
    "log_verbose_level": int,
    "log_format": str,
}
FORMATS = ("default", "ISO8601", "json")
_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR"}
#: What makes the lines may be compiled, which leaves no frame to take a place from.
_ACCESS_PLACE = ("access.py", 1)
#: What the kernel writes to a pipe in one piece, so that what others write there does not come between.
_PIPE_BYTES = 4096
#: A value as JSON.
quoted = json.JSONEncoder(ensure_ascii=False).encode
_WRONG_TYPE = {
    str: "attempt to access JSON non-string as string",
    bool: "attempt to access JSON non-boolean as boolean",
    int: "attempt to access JSON non-unsigned-integer as unsigned-integer",
}


class Log:
    """Writes lines, as the settings say. The settings are plain attributes; `update` changes them checked."""

    def __init__(self, *, escape: bool = True) -> None:
        self.log_file = ""
        self.log_info = True
        self.log_warning = True
        self.log_error = True
        self.verbose_level = 0
        self.log_format: str = "default"
        self.escape = escape
        self._file: TextIO | None = None
        #: Lines of the access log that are not written yet. Other threads write them before their own.
        self._held: deque[str] = deque()
        #: Whether the sink that lines of the access log were written to last is a file.
        self._asked: TextIO | None = None
        self._is_file = False

    def configure(
        self,
        *,
        verbose: int = 0,
        info: bool = True,
        warning: bool = True,
        error: bool = True,
        format: str = "default",
        file: str = "",
    ) -> None:
        """Applies the options of the command line. Raises InvalidArgument if the file cannot be opened.

        TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 in the environment leaves messages as they are, line breaks included.
        """
        self.escape = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "1").lower() not in ("0", "false", "off")
        self.log_info, self.log_warning, self.log_error = info, warning, error
        self.verbose_level, self.log_format = verbose, format
        self.close()
        if file:
            try:
                self._file = open(file, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - until close
            except OSError as reason:
                raise InvalidArgument(f"Failed to open log file '{file}': {reason.strerror}") from reason
        self.log_file = file

    def close(self) -> None:
        """Writes what there is and closes the log file; later lines go to the console."""
        self.flush()
        if self._file is not None:
            with suppress(OSError):  # a disk that is full: what could not be written until now is lost
                self._file.close()
        self._file = None
        self.log_file = ""

    # ------------------------------------------------------------ lines

    def info(self, message: str) -> None:
        if self.log_info:
            self._line("I", message, *_place())

    def warning(self, message: str) -> None:
        if self.log_warning:
            self._line("W", message, *_place())

    def error(self, message: str) -> None:
        if self.log_error:
            self._line("E", message, *_place())

    def exception(self, message: str, error: BaseException) -> None:
        """Logs an exception that should not have happened, with where it came from."""
        if self.log_error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._line("E", f"{message}: {trace}", *_place())

    def verbose(self, message: str, level: int = 1) -> None:
        if self.verbose_level >= level:
            self._line("I", message, *_place())

    def table(self, text: str) -> None:
        """Logs lines that must stay as they are, at the level info."""
        if self.log_info:
            self._line("I", "\n" + text, *_place(), escape=False)

    def write(self, level: Level, message: str, file: str, line: int) -> None:
        """Writes a line as of `file:line`, if its level is on: for code in hosts and in libraries."""
        if level == "VERBOSE":
            wanted = self.verbose_level >= 1
        else:
            wanted = {"ERROR": self.log_error, "WARNING": self.log_warning, "INFO": self.log_info}[level]
        if wanted:
            self._line("I" if level == "VERBOSE" else level[0], message, file, line)

    def access_head(self, time_ns: int) -> str:
        """The beginning of lines of the access log that are from a time (ns since 1970), in the format json an object
        that is still open. They are written whatever levels are on: whoever does not want them does not ask for them."""
        pid, (file, line) = os.getpid(), _ACCESS_PLACE
        if self.log_format == "json":
            return as_json("I", time_ns, pid, file, line, "access").removesuffix("}")
        return f"{prefix('I', time_ns, pid, file, line, self.log_format)}] "

    def hold(self, lines: str) -> None:
        """Takes lines of the access log, to be written by `flush`, or before the next line of another kind."""
        self._held.append(lines)

    def flush(self) -> None:
        """Writes the lines of the access log that are not written yet."""
        held = self._held
        texts: list[str] = []
        with suppress(IndexError):  # this was all
            while True:
                texts.append(held.popleft())
        if not texts:
            return
        sink: TextIO = self._file or sys.stdout
        text = "".join(texts)
        if sink is not self._asked:
            self._asked, self._is_file = sink, _is_file(sink)
        most = len(text) if self._is_file else _PIPE_BYTES
        begin = 0
        while begin < len(text):
            end = begin + most
            if end < len(text):
                end = text.rfind("\n", begin, end) + 1 or text.index("\n", end) + 1
            _write(sink, text[begin:end])
            begin = end

    def _line(
        self,
        severity: str,
        message: str,
        file: str,
        line: int,
        escape: bool = True,
    ) -> None:
        time_ns, pid, file = time.time_ns(), os.getpid(), os.path.basename(file)
        if self.log_format == "json":
            text = as_json(severity, time_ns, pid, file, line, message)
        else:
            if escape and self.escape:
                message = quoted(message)
            text = f"{prefix(severity, time_ns, pid, file, line, self.log_format)}] {message}"
        if self._held:
            self.flush()
        _write(self._file or (sys.stdout if severity == "I" else sys.stderr), text + "\n")

    # ------------------------------------------------------------ settings

    def get(self, model: str | None = None) -> dict[str, bool | int | str]:
        """The settings as clients see them. They are the server's: `model` makes no difference."""
        return {
            "log_file": self.log_file,
            "log_info": self.log_info,
            "log_warning": self.log_warning,
            "log_error": self.log_error,
            "log_verbose_level": self.verbose_level,
            "log_format": self.log_format,
        }

    def update(self, model: str | None, values: Mapping[str, Any]) -> dict[str, bool | int | str]:
        """Changes the settings in `values`, all or none; None leaves one as it is, unknown ones are ignored.

        Returns all settings. Raises Triton's errors: Unsupported for the file, Internal for a wrong type,
        Unavailable for an unknown format.
        """
        given: dict[str, Any] = {key: values[key] for key in SETTINGS if values.get(key) is not None}
        for key, value in given.items():
            problem = _problem(key, value)
            if problem is not None:
                raise problem
        if "log_verbose_level" in given:
            # Triton keeps an int32, and what is less than none as none.
            level = given.pop("log_verbose_level") % 2**32
            self.verbose_level = level if level < 2**31 else 0
        for key, value in given.items():
            setattr(self, key, value)
        return self.get(model)


def _problem(key: str, value: Any) -> NaiadError | None:
    kind = SETTINGS[key]
    if key == "log_file":
        return Unsupported("log file location can not be updated through network protocol")
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**64):
        return Internal(_WRONG_TYPE[kind])
    if key == "log_format" and value not in FORMATS:
        return Unavailable(f"invalid argument for --log_format, got: {value}")
    return None


def _is_file(sink: TextIO) -> bool:
    """Whether what is written there at once stays together, however much it is."""
    try:
        return stat.S_ISREG(os.fstat(sink.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _write(sink: TextIO, text: str) -> None:
    try:
        if not text.isascii():
            # What a line says must not cost it, nor those that are written with it.
            encoding = sink.encoding or "utf-8"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        sink.write(text)
        sink.flush()
    except (OSError, ValueError, UnicodeError):
        pass  # a log that cannot be written must not stop the server


@lru_cache(maxsize=4)
def _utc(format: str, seconds: int) -> str:
    return time.strftime(format, time.gmtime(seconds))


def prefix(severity: str, time_ns: int, pid: int, file: str, line: int, format: str) -> str:
    """The beginning of a line up to the bracket, times in UTC:

    default: `I1121 05:11:45.934966 6330 server.py:241`
    ISO8601: `2026-11-21T05:11:45Z I 6330 server.py:241`
    """
    seconds, rest = divmod(time_ns, 1_000_000_000)
    if format == "ISO8601":
        return f"{_utc('%Y-%m-%dT%H:%M:%SZ', seconds)} {severity} {pid} {file}:{line}"
    return f"{severity}{_utc('%m%d %H:%M:%S', seconds)}.{rest // 1000:06d} {pid} {file}:{line}"


def as_json(severity: str, time_ns: int, pid: int, file: str, line: int, message: str) -> str:
    """A line as an object: `{"time": "2026-11-21T05:11:45.934966Z", "level": "INFO", ..., "message": "..."}`."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    when = f"{_utc('%Y-%m-%dT%H:%M:%S', seconds)}.{rest // 1000:06d}Z"
    level = _LEVELS[severity]
    return quoted({"time": when, "level": level, "pid": pid, "file": file, "line": line, "message": message})


def _place() -> tuple[str, int]:
    """File and line of the caller of the method that called this."""
    frame: FrameType = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


class _Bridge(logging.Handler):
    """Passes records of Python's `logging` on."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            level: Level = "ERROR"
        elif record.levelno >= logging.WARNING:
            level = "WARNING"
        else:
            # What libraries tell about themselves is of interest to who looks for something.
            level = "VERBOSE"
        try:
            message = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                message += "\n" + (record.exc_text or logging.Formatter().formatException(record.exc_info))
        except Exception:
            self.handleError(record)
            return
        self._log.write(level, message, record.pathname, record.lineno)


def bridge(log: Log, logger: logging.Logger | None = None) -> None:
    """Sends what libraries write with `logging` to `log`; without a logger, of all libraries. For the server only."""
    target = logger if logger is not None else logging.getLogger()
    for handler in [handler for handler in target.handlers if isinstance(handler, _Bridge)]:
        target.removeHandler(handler)
    target.addHandler(_Bridge(log))
