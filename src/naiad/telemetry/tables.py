"""The table of models that the server shows when it has started: in colour on a terminal, plain in a log."""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from naiad.metadata import IndexEntry
from naiad.telemetry.log import Log

#: The most characters of a cell in a line, where nobody says how wide lines may be; a path may be longer.
_WIDEST = 100
_HEADINGS = ("Model", "Version", "Status")


def show_models(log: Log, entries: Sequence[IndexEntry], reasons: Mapping[str, str]) -> None:
    """Shows each model version with its state and, where there is one, the reason. Nothing if there are no models.
    `reasons` say, by name, why there is no version of a model.

    A terminal that knows all characters gets a table as wide as it is; otherwise the table goes to the log, at the level
    info.
    """
    rows = [row(entry, reasons.get(entry.name, "")) for entry in entries]
    if not log.log_info or not rows:
        return
    if not log.log_file and sys.stdout.isatty() and sys.stdout.encoding == "utf-8":
        with suppress(OSError):  # the terminal is closed
            _print_rich(rows)
    else:
        log.table(plain_table(_HEADINGS, rows))


def row(entry: IndexEntry, why: str = "") -> tuple[str, str, str]:
    """Name, version and status of an entry; a model never loaded is NOT LOADED, and `why`."""
    status = entry.state or "NOT LOADED"
    reason = ((entry.reason or "") if entry.state else why).strip()
    return entry.name, entry.version or "-", f"{status}: {reason}" if reason else status


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with borders of ASCII characters. Cells may have several lines; long ones are wrapped."""
    cells = [[list(_wrapped(cell)) for cell in cells] for cells in (headings, *rows)]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [border]
    for index, row_cells in enumerate(cells):
        for number in range(max(map(len, row_cells))):
            texts = [cell[number] if number < len(cell) else "" for cell in row_cells]
            lines.append("|" + "|".join(f" {text:{width}} " for text, width in zip(texts, widths, strict=True)) + "|")
        if index == 0 or index == len(cells) - 1:
            lines.append(border)
    return "\n".join(lines)


def _wrapped(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield from textwrap.wrap(line, _WIDEST, break_long_words=False, break_on_hyphens=False) or [""]


def _print_rich(rows: Sequence[tuple[str, str, str]]) -> None:
    # rich takes longer to import than the rest of this package, and a server without a terminal never needs it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*_HEADINGS)
    for name, version, status in rows:
        state = status.partition(":")[0]
        style = {"READY": "green", "UNAVAILABLE": "red"}.get(state, "yellow")
        table.add_row(Text(name), Text(version), Text(status, style=style))
    Console().print(table)
