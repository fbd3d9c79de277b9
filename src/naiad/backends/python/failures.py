"""How failures of model code read: Triton's exception class and its form of a Python traceback. And where one ends that
was raised in a process which model code has forked: it is no failure of the model.
"""

import os
import sys
from types import FrameType

from naiad.errors import NaiadError, text_of

#: Modules whose frames are not the model's. Triton's own part is not Python, so its texts do not show it either.
_OWN = "naiad."
_IMPORTS = "<frozen importlib."


class TritonModelException(Exception):
    """What every call of `pb_utils` raises that Triton refuses."""


def exception_text(error: BaseException) -> str:
    """The text a client sees of an exception of model code, innermost frame first.

        ValueError: no such label

        At:
          /models/classify/1/model.py(14): execute

    An error without frames of the model, such as a syntax error in its file, has no "At" part. One whose text cannot be
    had says why. A `NaiadError` stands for itself.
    """
    if isinstance(error, NaiadError):
        return text_of(error)
    text = _with_frames(error)
    try:
        str(error)
    except BaseException as another:
        gap = "" if text.endswith("\n") else "\n"
        text = f"{text}{gap}\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: {_with_frames(another)}"
    return text


def _with_frames(error: BaseException) -> str:
    text = f"{type(error).__name__}: {text_of(error) or '<EMPTY MESSAGE>'}"
    # Compiled functions are frames of tracebacks only, which lead nowhere; importlib takes its own out of tracebacks.
    outermost: FrameType | None = None
    frame: FrameType | None = None
    traceback = error.__traceback__
    while traceback is not None:
        if not _is_own(traceback.tb_frame):
            frame = traceback.tb_frame
            outermost = outermost or frame
        traceback = traceback.tb_next
    lines: list[str] = []
    is_inside = True
    while frame is not None and (is_inside or frame.f_code.co_filename.startswith(_IMPORTS)):
        if not _is_own(frame):
            lines.append(f"  {frame.f_code.co_filename}({frame.f_lineno}): {frame.f_code.co_name}\n")
        is_inside = is_inside and frame is not outermost
        frame = frame.f_back
    return f"{text}\n\nAt:\n{''.join(lines)}" if lines else text


def _is_own(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").startswith(_OWN))


def end_fork(host: int, error: BaseException) -> None:
    """Returns in the process `host`. In a child that model code has forked and that did not end by itself, `error` is
    what it was to end with: it ends, as a Python program does, with the status of `sys.exit`, or with a traceback on
    stderr and 1."""
    if os.getpid() == host:
        return
    status = 1
    try:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        elif error.code is None or isinstance(error.code, int):
            status = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
