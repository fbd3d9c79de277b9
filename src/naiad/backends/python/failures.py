"""How failures of model code read: Triton's exception class and its form of a Python traceback. And where one ends that
was raised in a process which model code has forked: it is no failure of the model.
"""

import os
import sys
from types import FrameType

from naiad.errors import NaiadError, text_of

#: Modules whose frames are not the model's. Triton's own part is not Python, so its texts do not show it either.
_OWN = "naiad."


class TritonModelException(Exception):
    """What every call of `pb_utils` raises that Triton refuses."""


def exception_text(error: BaseException) -> str:
    """The text a client sees of an exception of model code, innermost frame first.

        ValueError: no such label

        At:
          /models/classify/1/model.py(14): execute

    An error without frames of the model, such as a syntax error in its file, has no "At" part. A `NaiadError`
    stands for itself.
    """
    if isinstance(error, NaiadError):
        return text_of(error)
    text = f"{type(error).__name__}: {text_of(error)}"
    traceback = error.__traceback__
    if traceback is None:
        return text
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    lines: list[str] = []
    frame: FrameType | None = traceback.tb_frame
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == f"{__package__}.backend":
            break
        if not module.startswith(_OWN):
            lines.append(f"  {frame.f_code.co_filename}({frame.f_lineno}): {frame.f_code.co_name}\n")
        frame = frame.f_back
    return f"{text}\n\nAt:\n{''.join(lines)}" if lines else text


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
