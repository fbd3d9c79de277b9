"""What lines of the access log say, whatever has been said before."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.telemetry.access_lines import NAMES, AccessLines
from naiad.telemetry.log import Log, as_json, prefix

SECOND = 1_000_000_000
few = st.sampled_from([0, 1, 64, 9_999, 10_000, 10**9])
TURNS = st.lists(
    st.tuples(
        st.sampled_from([0, 7_000, SECOND - 1, SECOND, 1_795_238_705_034_966_123]),
        st.lists(
            st.tuples(
                st.sampled_from(["m", 'a "b"', "\u00fc\n"]),
                st.sampled_from([1, 2]),
                st.sampled_from(["", "7", '\\ "']),
                st.sampled_from(["OK", "INVALID_ARG"]),
                *[few] * 6,
            ),
            min_size=1,
            max_size=4,
        ),
    ),
    max_size=4,
)


def document(value):
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("format", ["default", "ISO8601", "json"])
@given(turns=TURNS)
def test_lines(turns, format):
    log = Log()
    log.log_format = format
    lines = AccessLines("HTTP", format, log.access_head)
    for time_ns, requests in turns:
        lines.begin(time_ns)
        expected = []
        for request in requests:
            lines.add(*request)
            values = dict(zip(NAMES, ["HTTP", *request], strict=True))
            if format == "json":
                whole = json.loads(as_json("I", time_ns, 1, "access.py", 1, "access"))
                expected.append(document({**whole, **values}))
            else:
                said = " ".join([f"{name}={document(value)}" for name, value in values.items()])
                expected.append(f"{prefix('I', time_ns, 1, 'access.py', 1, format)}] access {said}")
        assert lines.take() == "".join([f"{line}\n" for line in expected])


@pytest.fixture(autouse=True, scope="module")
def process_1():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        yield


def test_more_models_than_are_kept():
    lines = AccessLines("HTTP", "default", lambda time_ns: "")
    for number in range(3000):
        lines.add(str(number), 1, "", "OK", 1, 2, 3, 4, 5, 1)
        assert f' model="{number}" ' in lines.take()
    assert len(lines._usual) <= 1024


def test_a_time_that_went_backwards():
    lines = AccessLines("HTTP", "default", lambda time_ns: "")
    lines.add("m", 1, "", "OK", -5, 0, 0, 0, 0, 1)
    assert " queue_us=-5 " in lines.take()
