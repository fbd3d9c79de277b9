import pytest

from naiad.instances.restart import RestartPolicy


@pytest.mark.parametrize(
    ("events", "pauses"),
    [
        pytest.param([("fail", 1)] * 6, [0, 0.5, 1, 2, 4, None], id="pauses grow until it is given up"),
        pytest.param([("fail", 1), ("start", 2), ("fail", 61.9)], [0, 0.5], id="less than a minute is no healthy run"),
        pytest.param([("fail", 1), ("start", 2), ("fail", 62)], [0, 0], id="a minute forgets the failures before"),
        pytest.param([("fail", 1), ("fail", 100)], [0, 0], id="a start that hung for long was no failure in a row"),
        pytest.param(
            [("fail", 1), *[("fail", 2)] * 5, ("start", 70), ("fail", 130)],
            [0, 0.5, 1, 2, 4, None, 0],
            id="after being given up a healthy run counts too",
        ),
    ],
)
def test_pauses(events, pauses):
    policy = RestartPolicy(now=0.0)
    answers = []
    for event, now in events:
        if event == "start":
            policy.started(now)
        else:
            answers.append(policy.failed(now))
    assert answers == pauses
