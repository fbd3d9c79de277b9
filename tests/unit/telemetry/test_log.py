import io
import json
import logging
import re
import time
from datetime import datetime, timedelta

import pytest

from naiad.errors import Internal, InvalidArgument, NaiadError, Unavailable, Unsupported
from naiad.metadata import IndexEntry
from naiad.telemetry.access_lines import AccessLines
from naiad.telemetry.log import SETTINGS, Log, bridge, prefix
from naiad.telemetry.tables import plain_table, row, show_models

DEFAULT = re.compile(r"^([IWE])\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ ([\w.]+):(\d+)\] (.*)$")
NAMES = [
    *("protocol", "model", "version", "id", "status"),
    *("queue_us", "compute_us", "total_us", "bytes_in", "bytes_out", "responses"),
]
ACCESS = ("a b", 3, "ü", "OK", 5, 6, 12, 20, 24, 1)
WHOLE = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def access(log, *requests):
    """Has the log hold the lines of requests that end now."""
    lines = AccessLines("HTTP", log.log_format, log.access_head)
    lines.begin(time.time_ns())
    for request in requests:
        lines.add(*request)
    log.hold(lines.take())


def test_prefixes():
    moment = 1_795_238_705_934_966_123  # 2026-11-21 05:25:05.934966 UTC
    assert prefix("I", moment, 6330, "server.py", 241, "default") == "I1121 05:25:05.934966 6330 server.py:241"
    assert prefix("E", moment, 7, "a.py", 1, "ISO8601") == "2026-11-21T05:25:05Z E 7 a.py:1"


def test_each_level_has_its_sink_and_says_where_it_was_called(capsys):
    log = Log()
    log.info("one")
    log.warning("two")
    log.error("three")
    printed = capsys.readouterr()
    (info,) = map(DEFAULT.match, printed.out.splitlines())
    warning, error = map(DEFAULT.match, printed.err.splitlines())
    assert (info[1], info[2], info[4]) == ("I", "test_log.py", '"one"')
    assert (warning[1], warning[4]) == ("W", '"two"')
    assert (error[1], error[4]) == ("E", '"three"')
    assert int(error[3]) == int(warning[3]) + 1


@pytest.mark.parametrize(
    ("message", "line"),
    [('a "b"\nc\\', r'"a \"b\"\nc\\"'), ("\x1b[31m", r'"\u001b[31m"'), ("grün", '"grün"')],
)
def test_messages_are_escaped_so_that_they_stay_on_their_line(capsys, message, line):
    Log().info(message)
    assert capsys.readouterr().out.endswith(f"] {line}\n")


def test_escaping_can_be_turned_off(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    log = Log()
    log.configure()
    log.info('a "b"\nc')
    assert capsys.readouterr().out.endswith('] a "b"\nc\n')
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "1")
    log.configure()
    log.info("a\nb")
    assert capsys.readouterr().out.endswith('] "a\\nb"\n')


def test_levels_can_be_off(capsys):
    log = Log()
    log.configure(info=False, warning=False, error=False)
    log.info("x")
    log.warning("x")
    log.error("x")
    log.table("x")
    for level in ("INFO", "WARNING", "ERROR", "VERBOSE"):
        log.write(level, "x", "a.py", 1)
    assert capsys.readouterr() == ("", "")


def test_verbose_lines_need_their_level(capsys):
    log = Log()
    log.verbose("never")
    log.configure(verbose=1)
    log.verbose("one")
    log.verbose("two", level=2)
    log.write("VERBOSE", "three", "/dir/model.py", 7)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in lines] == ['"one"', '"three"']
    assert "model.py:7" in lines[1]
    assert "/dir" not in lines[1]


def test_a_file_takes_the_place_of_both_sinks(tmp_path, capsys):
    path = tmp_path / "log"
    path.write_text("before\n")
    log = Log()
    log.configure(file=str(path), format="ISO8601")
    log.info("one")
    log.error("two")
    assert log.get()["log_file"] == str(path)
    log.close()
    before, one, two = path.read_text().splitlines()
    assert before == "before"
    assert re.match(r'^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ test_log.py:\d+\] "one"$', one)
    assert '] "two"' in two
    assert capsys.readouterr() == ("", "")
    log.info("three")
    assert "three" in capsys.readouterr().out


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="Failed to open log file"):
        Log().configure(file=str(tmp_path / "missing" / "log"))


def test_a_broken_sink_does_not_stop_the_server(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    Log().info("x")


def test_a_full_disk_does_not_stop_the_server():
    log = Log()
    log.configure(file="/dev/full")
    log.info("lost")
    log.close()
    assert log.log_file == ""


def test_an_exception_is_logged_with_where_it_came_from(capsys):
    log = Log()
    try:
        raise RuntimeError("why")
    except RuntimeError as error:
        log.exception("watching failed", error)
        log.log_error = False
        log.exception("silent", error)
    line = DEFAULT.match(capsys.readouterr().err)
    assert line[2] == "test_log.py"
    text = json.loads(line[4])
    assert text.startswith("watching failed: Traceback")
    assert text.endswith("RuntimeError: why")


def test_settings_in_tritons_order():
    assert Log().get() == WHOLE
    assert list(Log().get("model")) == list(WHOLE) == list(SETTINGS)


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({}, {}),
        ({"log_info": False}, {"log_info": False}),
        ({"log_verbose_level": 1}, {"log_verbose_level": 1}),
        ({"log_verbose_level": 2**32 + 1}, {"log_verbose_level": 1}),
        ({"log_verbose_level": 2**32 - 1}, {}),
        ({"log_format": "ISO8601"}, {"log_format": "ISO8601"}),
        ({"log_info": None, "log_file": None}, {}),
        ({"log_colour": True}, {}),
        ({"log_warning": False, "log_error": False}, {"log_warning": False, "log_error": False}),
    ],
)
def test_updates(values, changed):
    log = Log()
    assert log.update(None, values) == {**WHOLE, **changed}
    assert log.get() == {**WHOLE, **changed}


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"log_file": "x"}, Unsupported, "log file location can not be updated through network protocol"),
        ({"log_info": "no"}, Internal, "attempt to access JSON non-boolean as boolean"),
        ({"log_info": 1}, Internal, "attempt to access JSON non-boolean as boolean"),
        ({"log_verbose_level": "1"}, Internal, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_verbose_level": -1}, Internal, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_verbose_level": 2**64}, Internal, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_verbose_level": True}, Internal, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_format": 1}, Internal, "attempt to access JSON non-string as string"),
        ({"log_format": "fancy"}, Unavailable, "invalid argument for --log_format, got: fancy"),
    ],
)
def test_wrong_updates_change_nothing(values, kind, message):
    log = Log()
    with pytest.raises(NaiadError) as caught:
        log.update(None, {"log_warning": False, **values})
    assert (type(caught.value), caught.value.message) == (kind, message)
    assert log.get() == WHOLE


@pytest.fixture
def logger():
    logger = logging.Logger("library")  # not one of the process
    yield logger
    logger.handlers.clear()


def test_libraries_log_here_too(logger, capsys):
    log = Log()
    bridge(log, logger)
    bridge(log, logger)
    logger.info("told %s", "nobody")
    log.configure(verbose=1)
    logger.info("told %s", "somebody")
    logger.warning("beware")
    try:
        raise RuntimeError("why")
    except RuntimeError:
        logger.exception("failed")
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert '] "told somebody"' in printed.out
    warning, error = map(DEFAULT.match, printed.err.splitlines())
    assert warning[4] == '"beware"'
    assert warning[2] == "test_log.py"
    assert json.loads(error[4]).startswith("failed\nTraceback")
    assert json.loads(error[4]).endswith("RuntimeError: why")


ENTRIES = [
    IndexEntry("fine", "1", "READY"),
    IndexEntry("broken", "2", "UNAVAILABLE", "Internal: no\nAt: line 3\n"),
    IndexEntry("idle"),
    IndexEntry("typo"),
]
REASONS = {"broken": "of another try", "typo": "config.pbtxt:1:1: no such field\n"}


def test_the_table_of_models_goes_to_the_log(capsys):
    show_models(Log(), ENTRIES, REASONS)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("] ")
    assert lines == [
        "+--------+---------+---------------------------------------------+",
        "| Model  | Version | Status                                      |",
        "+--------+---------+---------------------------------------------+",
        "| fine   | 1       | READY                                       |",
        "| broken | 2       | UNAVAILABLE: Internal: no                   |",
        "|        |         | At: line 3                                  |",
        "| idle   | -       | NOT LOADED                                  |",
        "| typo   | -       | NOT LOADED: config.pbtxt:1:1: no such field |",
        "+--------+---------+---------------------------------------------+",
    ]


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding):
        super().__init__(io.BytesIO(), encoding)

    def isatty(self):
        return True

    def shown(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def test_the_table_of_models_on_a_terminal(monkeypatch):
    terminal = Terminal("utf-8")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    show_models(Log(), ENTRIES, REASONS)
    text = terminal.shown()
    assert "UNAVAILABLE: Internal: no" in text
    assert "idle" in text
    assert "] " not in text


def test_a_terminal_that_does_not_know_all_characters_gets_a_plain_table(monkeypatch):
    terminal = Terminal("ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    show_models(Log(), [IndexEntry("mod\u00e8le", "1", "READY")], {})
    assert "| mod\\xe8le | 1       | READY  |" in terminal.shown()


def test_long_reasons_are_wrapped_and_paths_stay_whole():
    path = "/".join(["folder"] * 20)
    table = plain_table(("Status",), [(f"INTERNAL: {'word ' * 30}\n\n  at {path}",)])
    assert path in table
    assert max(map(len, table.splitlines())) == len(path) + 4
    assert table.splitlines()[4] == "| " + " ".join(["word"] * 12).ljust(len(path)) + " |"


def test_no_models_make_no_table(capsys):
    assert plain_table(("A", "B"), []) == "+---+---+\n| A | B |\n+---+---+"
    show_models(Log(), [], {})
    assert capsys.readouterr().out == ""


def test_rows():
    assert row(IndexEntry("m", "1", "LOADING")) == ("m", "1", "LOADING")


def test_lines_as_json_objects(capsys):
    log = Log()
    log.configure(format="json")
    log.warning('a "b"\nc')
    access(log, ACCESS)
    log.flush()
    printed = capsys.readouterr()
    warning, line = json.loads(printed.err), json.loads(printed.out)
    assert (warning["level"], warning["message"], warning["file"]) == ("WARNING", 'a "b"\nc', "test_log.py")
    assert datetime.fromisoformat(warning["time"]).utcoffset() == timedelta(0)
    assert (line["level"], line["message"], line["file"]) == ("INFO", "access", "access.py")
    assert list(line)[-11:] == NAMES
    assert (line["model"], line["version"], line["id"], line["queue_us"]) == ("a b", 3, "ü", 5)


def test_access_lines_are_written_whatever_levels_are_on(capsys):
    log = Log()
    log.configure(info=False)
    access(log, ACCESS)
    log.flush()
    values = 'protocol="HTTP" model="a b" version=3 id="ü" status="OK" queue_us=5 compute_us=6 total_us=12'
    (line,) = map(DEFAULT.match, capsys.readouterr().out.splitlines())
    assert (line[1], line[2]) == ("I", "access.py")
    assert line[4] == f"access {values} bytes_in=20 bytes_out=24 responses=1"


def test_access_lines_come_together_and_before_what_is_said_later(capsys, tmp_path):
    log = Log()
    log.configure(file=str(tmp_path / "log"))
    access(log, ACCESS, ACCESS)
    assert not (tmp_path / "log").read_text()
    log.info("after")
    access(log, ACCESS)
    log.close()
    said = [line.split("] ")[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert [text.split()[0] for text in said] == ["access", "access", '"after"', "access"]
    log.flush()
    assert capsys.readouterr() == ("", "")


class Pieces(io.TextIOWrapper):
    """A sink that remembers what each write had."""

    def __init__(self, encoding, sink=None):
        super().__init__(io.BytesIO() if sink is None else sink, encoding)
        self.written = []

    @classmethod
    def open(cls, path):
        return cls("utf-8", path.open("wb"))

    def write(self, text):
        self.written.append(text)
        return super().write(text)


def test_access_lines_are_written_in_pieces_that_nothing_comes_between(monkeypatch):
    sink = Pieces("utf-8")
    monkeypatch.setattr("sys.stdout", sink)
    log = Log()
    longer = (*ACCESS[:2], "x" * 5000, *ACCESS[3:])
    access(log, *[ACCESS] * 50, longer, ACCESS)
    log.flush()
    assert "".join(sink.written).count("\n") == 52
    assert 3 <= len(sink.written) < 8
    for piece in sink.written:
        assert piece.endswith("\n")
        assert len(piece) <= 4096 or piece.count("\n") == 1


def test_access_lines_go_to_a_file_all_at_once(tmp_path, monkeypatch):
    log = Log()
    with Pieces.open(tmp_path / "out") as sink:
        monkeypatch.setattr("sys.stdout", sink)
        access(log, *[ACCESS] * 100)
        access(log, ACCESS)
        log.flush()
        assert [piece.count("\n") for piece in sink.written] == [101]
    assert (tmp_path / "out").read_text(encoding="utf-8").count("\n") == 101


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_a_client_sends_does_not_cost_the_lines_of_others(monkeypatch, encoding):
    sink = Pieces(encoding)
    monkeypatch.setattr("sys.stdout", sink)
    log = Log()
    access(log, ACCESS, (*ACCESS[:2], "\udcff", *ACCESS[3:]))
    log.flush()
    first, second = "".join(sink.written).splitlines()
    assert "bytes_in=20" in first
    assert r'id="\udcff" status="OK"' in second


@pytest.mark.parametrize(("encoding", "name"), [("utf-8", "mod\u00e8le"), ("ascii", r"mod\xe8le")])
def test_a_line_is_written_in_any_encoding(monkeypatch, encoding, name):
    sink = Pieces(encoding)
    monkeypatch.setattr("sys.stderr", sink)
    Log().error("failed to load 'mod\u00e8le'")
    assert name in "".join(sink.written)


def test_access_lines_that_cannot_be_written_are_dropped(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    log = Log()
    access(log, ACCESS)
    log.flush()
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    log.flush()
    assert not written.getvalue()
