"""The life of models as a table: what is wanted, what is there, which steps follow."""

import pytest

from naiad.models.plan import Abandon, Actual, Block, Retire, Step, Update, Wanted, plan

W = Wanted
A = Actual


@pytest.mark.parametrize(
    ("wanted", "actual", "steps"),
    [
        pytest.param({}, {}, [], id="nothing wanted, nothing there"),
        pytest.param({"m": W(1)}, {}, [Update("m")], id="new model"),
        pytest.param({"m": W(1)}, {"m": A(loading=1)}, [], id="load during load joins"),
        pytest.param({"m": W(2)}, {"m": A(loading=1)}, [], id="another load waits for the first"),
        pytest.param({"m": W(1)}, {"m": A(serving=1)}, [], id="unchanged"),
        pytest.param({"m": W(2)}, {"m": A(serving=1)}, [Update("m")], id="changed: new one beside the old"),
        pytest.param({"m": W(2)}, {"m": A(serving=1, loading=2)}, [], id="reload under way, the old one serves"),
        pytest.param({"m": W(2)}, {"m": A(serving=1, failed=2)}, [], id="failed reload: the old one goes on"),
        pytest.param({"m": W(3)}, {"m": A(serving=1, failed=2)}, [Update("m")], id="changed again after a failure"),
        pytest.param({"m": W(1)}, {"m": A(failed=1)}, [], id="what failed is not tried again by itself"),
        pytest.param({"m": W(1)}, {"m": A(serving=2, failed=1)}, [], id="back to what failed: the working one stays"),
        pytest.param({}, {"m": A(serving=1)}, [Retire("m")], id="not wanted any more"),
        pytest.param({}, {"m": A(loading=1)}, [Abandon("m")], id="unload during load"),
        pytest.param(
            {}, {"m": A(serving=1, loading=2)}, [Abandon("m"), Retire("m")], id="delete during reload: both go"
        ),
        pytest.param(
            {}, {"m": A(failed=1)}, [Retire("m")], id="a failed model that is not wanted: its failure is history"
        ),
        pytest.param({}, {"m": A(blocked=True)}, [Retire("m")], id="a blocked ensemble that is not wanted"),
        pytest.param({"e": W(1, ("m",)), "m": W(1)}, {}, [Update("m")], id="members first"),
        pytest.param({"e": W(1, ("m",)), "m": W(1)}, {"m": A(loading=1)}, [], id="the ensemble waits for its member"),
        pytest.param(
            {"e": W(1, ("m",)), "m": W(1)}, {"m": A(serving=1)}, [Update("e")], id="the ensemble when members serve"
        ),
        pytest.param(
            {"e": W(1, ("m",)), "m": W(2)}, {"m": A(serving=1)}, [Update("m")], id="not on a member about to change"
        ),
        pytest.param(
            {"e": W(1, ("m",)), "m": W(1)},
            {"m": A(serving=1, loading=2)},
            [],
            id="not on a member whose load has yet to be dropped",
        ),
        pytest.param(
            {"e": W(1, ("m",)), "m": W(2)},
            {"m": A(serving=1, failed=2)},
            [Update("e")],
            id="a member whose reload failed still serves",
        ),
        pytest.param(
            {"e": W(1, ("m",)), "m": W(1)}, {"m": A(failed=1)}, [Block("e", ("m",))], id="a member that failed"
        ),
        pytest.param({"e": W(1, ("m",))}, {}, [Block("e", ("m",))], id="a member that is not there"),
        pytest.param(
            {"e": W(1, ("m",))},
            {"e": A(serving=1), "m": A(serving=1)},
            [Retire("m"), Block("e", ("m",))],
            id="unloading a member takes the ensemble out",
        ),
        pytest.param({"e": W(1, ("m",))}, {"e": A(blocked=True)}, [], id="blocking is said once"),
        pytest.param(
            {"e": W(1, ("m",)), "m": W(1)},
            {"e": A(blocked=True), "m": A(serving=1)},
            [Update("e")],
            id="the ensemble comes back with its member",
        ),
        pytest.param(
            {"o": W(1, ("e",)), "e": W(1, ("m",)), "m": W(1)}, {"m": A(serving=1)}, [Update("e")], id="nested"
        ),
        pytest.param(
            {"o": W(1, ("e",)), "e": W(1, ("m",))},
            {"e": A(blocked=True)},
            [Block("o", ("e",))],
            id="a blocked member blocks",
        ),
        pytest.param({"e": W(1, ("e",))}, {}, [Block("e", ())], id="a member of itself"),
        pytest.param(
            {"e": W(1, ("m", "f")), "f": W(1, ("g",)), "g": W(1, ("e",)), "m": W(1)},
            {"m": A(serving=1)},
            [Block("e", ()), Block("f", ()), Block("g", ())],
            id="a circle",
        ),
        pytest.param(
            {"o": W(1, ("e",)), "e": W(1, ("e",))},
            {"e": A(blocked=True)},
            [Block("o", ("e",))],
            id="a member that is a circle",
        ),
    ],
)
def test_plan(wanted: dict[str, Wanted], actual: dict[str, Actual], steps: list[Step]) -> None:
    assert plan(wanted, actual) == steps
    assert plan(wanted, actual) == steps, "asking twice changes nothing"
