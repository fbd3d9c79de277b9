"""Who waits awake, how long, and who leaves the core to others."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from naiad.instances.busy_poll import Awaited, AwakeLoop, BusyPoll

US = 1000
MS = 1000 * US
WINDOW = 200 * US


class Core:
    """A clock that looks, yields and sleeps move on. `slices`: how long the others take the core, yield by yield."""

    def __init__(self, window_ns=WINDOW):
        self.now = 1_000 * MS
        self.slices = []
        self.looks = 0
        self.sleeps = 0
        self.comes_at = 0
        self.busy_poll = BusyPoll(window_ns, self.give_up, lambda: self.now)

    def give_up(self):
        self.now += self.slices.pop(0) if self.slices else 1 * US

    def poll(self, timeout_ms=None):
        if timeout_ms is None:
            self.sleeps += 1
            self.now = max(self.now, self.comes_at)
        else:
            assert timeout_ms == 0
            self.looks += 1
            self.now += 1 * US
        return self.now >= self.comes_at

    def wait(self, awaited, duration):
        """One wait for what comes after `duration`; how it was waited for."""
        self.looks = self.sleeps = 0
        self.comes_at = self.now + duration
        self.busy_poll.wait(awaited, self.poll)
        return ("awake" if self.looks else "") + (" asleep" if self.sleeps else "")


@pytest.mark.parametrize(
    ("waits_us", "how"),
    [
        ([100, 100, 199], [" asleep", "awake", "awake"]),
        ([100, 5_000, 100, 100], [" asleep", "awake asleep", " asleep", "awake"]),
        ([5_000, 5_000, 100, 100], [" asleep", " asleep", " asleep", "awake"]),
        ([0, 0], [" asleep", "awake"]),
        # What comes late, asleep, may come in time, awake.
        ([200, 100], [" asleep", "awake"]),
        ([799, 799, 100], [" asleep", "awake asleep", "awake"]),
        ([800, 100], [" asleep", " asleep"]),
    ],
)
def test_what_came_soon_last_time_is_waited_for_awake(waits_us, how):
    core, awaited = Core(), Awaited()
    assert [core.wait(awaited, us * US) for us in waits_us] == how


def test_what_comes_late_all_the_same_is_rarely_waited_for_awake():
    core, awaited = Core(), Awaited()
    seen = [core.wait(awaited, 300 * US) for _ in range(200)]
    tried = [at for at, how in enumerate(seen) if how == "awake asleep"]
    assert tried == [at for at in range(200) if 1 <= at % 64 <= 8]
    # Once in time, and there are as many tries as in the beginning.
    core.wait(awaited, 100 * US)
    assert [core.wait(awaited, 300 * US) for _ in range(10)] == ["awake asleep"] * 9 + [" asleep"]


def test_no_longer_than_the_window():
    core, awaited = Core(), Awaited()
    core.wait(awaited, 1 * US)
    began = core.now
    core.wait(awaited, 10_000 * US)
    # Each look and each yield take a microsecond.
    assert core.looks == WINDOW // (2 * US)
    assert core.now == began + 10_000 * US


def test_what_nobody_waited_for_did_not_come_soon():
    awaited = Awaited()
    # However soon after the start of the machine.
    awaited.came(1 * US, WINDOW)
    assert not awaited.is_soon


def test_a_window_of_0_is_never():
    core, awaited = Core(0), Awaited()
    assert [core.wait(awaited, 0) for _ in range(3)] == [" asleep"] * 3


class TestSeveralThreads:
    """Of those that execute; each waits in a thread of its own, as far as the test lets it."""

    @pytest.fixture
    def core(self):
        return Core()

    @pytest.fixture
    def pools(self, core):
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            for pool in (first, second):
                core.busy_poll.executing.add(pool.submit(threading.get_ident).result())
            yield first, second

    @staticmethod
    def begin_to_wait(core, pool):
        """A wait in a thread of the pool, asleep by now; what ends it, and its end."""
        sleeps, goes_on = threading.Event(), threading.Event()

        def poll(timeout_ms=None):
            assert timeout_ms is None
            sleeps.set()
            goes_on.wait()

        ended = pool.submit(core.busy_poll.wait, Awaited(), poll)
        sleeps.wait()
        return goes_on, ended

    def test_one_waits_awake_while_the_others_wait(self, core, pools):
        first, second = pools
        awaited = Awaited()
        # The other one executes.
        assert [first.submit(core.wait, awaited, 100 * US).result() for _ in range(2)] == [" asleep"] * 2
        goes_on, ended = self.begin_to_wait(core, second)
        assert first.submit(core.wait, awaited, 100 * US).result() == "awake"
        goes_on.set()
        ended.result()
        assert first.submit(core.wait, awaited, 100 * US).result() == " asleep"

    def test_who_begins_to_wait_later_takes_over(self, core, pools):
        first, second = pools
        awaited = {pool: Awaited() for pool in pools}
        for pool, others in ((first, second), (second, first)):
            goes_on, ended = self.begin_to_wait(core, others)
            pool.submit(core.wait, awaited[pool], 100 * US).result()
            goes_on.set()
            ended.result()
        goes_on, ended = self.begin_to_wait(core, second)
        looks, seen = 0, []

        def poll(timeout_ms=None):
            nonlocal looks
            if timeout_ms is None:
                return True
            looks += 1
            if looks == 3:
                goes_on.set()
                ended.result()
                seen.append(second.submit(core.wait, awaited[second], 50 * US).result())
            return False

        first.submit(core.busy_poll.wait, awaited[first], poll).result()
        assert (looks, seen) == (3, ["awake"])


def test_threads_of_model_code_that_ask_others_do_not_wait_awake():
    core, awaited = Core(), Awaited()
    core.busy_poll.executing.add(threading.get_ident())
    assert [core.wait(awaited, 100 * US) for _ in range(2)] == [" asleep", "awake"]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(core.wait, awaited, 100 * US).result() == " asleep"
    assert core.wait(awaited, 100 * US) == "awake"


def waits(core, awaited, duration):
    """How waits go for that long."""
    end = core.now + duration
    seen = []
    while core.now < end:
        seen.append(core.wait(awaited, 100 * US))
    return seen


def test_a_core_that_others_want_is_left_to_them_ever_longer_and_taken_back_when_they_have_gone():
    core, awaited = Core(), Awaited()
    core.wait(awaited, 1 * US)
    for pause_ms in (50, 100, 200, 400, 800, 1600, 2000, 2000):
        core.slices = [3 * MS]
        assert core.wait(awaited, 100 * US) == "awake asleep"
        assert set(waits(core, awaited, pause_ms * MS)) == {" asleep"}
    # Nobody else for twice as long as the last pause: the next one is short again.
    assert set(waits(core, awaited, 2100 * MS)) == {"awake"}
    core.slices = [3 * MS]
    core.wait(awaited, 100 * US)
    assert set(waits(core, awaited, 50 * MS)) == {" asleep"}
    assert core.wait(awaited, 100 * US) == "awake"


def test_short_work_of_others_is_no_reason_to_sleep():
    core, awaited = Core(), Awaited()
    core.wait(awaited, 1 * US)
    core.slices = [150 * US, 40 * US]
    assert core.wait(awaited, 195 * US) == "awake"
    assert core.wait(awaited, 100 * US) == "awake"


def bursts(every_ms, count):
    """How long waits go on until others, who take the core for 1 ms so often, are given it; None: that does not happen."""
    core, awaited = Core(2 * MS), Awaited()
    core.wait(awaited, 1 * US)
    began = core.now
    for _ in range(count):
        end = core.now + every_ms * MS
        core.slices = [1 * MS]
        if core.wait(awaited, 1500 * US) != "awake":
            return core.now - began
        core.slices = []
        while core.now < end:
            core.wait(awaited, 100 * US)
    return None


def test_bursts_of_others_are_no_reason_to_sleep_unless_they_take_more_than_a_tenth_of_the_time():
    assert bursts(every_ms=11, count=200) is None
    # Each burst is 1 ms, of which 0.5 ms are spared until the next one.
    assert bursts(every_ms=5, count=200) < 30 * MS
    assert bursts(every_ms=2, count=200) < 10 * MS


class Turns:
    """An event loop that does what is due, one turn at a time."""

    def __init__(self):
        self.due = []

    def call_soon(self, callback):
        self.due.append(callback)

    def turn(self):
        due, self.due = self.due, []
        for callback in due:
            callback()


def turns_taken(loop):
    count = 0
    while loop.due:
        assert len(loop.due) == 1
        loop.turn()
        count += 1
    return count


def test_a_loop_stays_awake_for_the_window_and_longer_when_asked_again():
    core, loop = Core(), Turns()
    awake = AwakeLoop(loop, core.busy_poll, clock=lambda: core.now)
    awake.stay_awake(core.now)
    assert turns_taken(loop) == WINDOW // US + 1
    awake.stay_awake(core.now)
    loop.turn()
    awake.stay_awake(core.now)
    awake.stay_awake(core.now)
    assert turns_taken(loop) == WINDOW // US + 1


def test_a_loop_sleeps_where_others_want_the_core_or_it_may_not_wait_awake():
    core, loop = Core(), Turns()
    awake = AwakeLoop(loop, core.busy_poll, clock=lambda: core.now)
    core.slices = [3 * MS]
    awake.stay_awake(core.now)
    assert turns_taken(loop) == 2
    awake.stay_awake(core.now)
    assert not loop.due
    core.now += 51 * MS
    awake.stay_awake(core.now)
    assert loop.due
    never = AwakeLoop(Turns(), BusyPoll(0))
    never.stay_awake(core.now)
    assert never.window_ns == 0


def test_under_a_quota_so_many_hosts_wait_awake_and_others_when_these_have_ended():
    awake = AwakeLoop(Turns(), BusyPoll(WINDOW), 2)
    assert [awake.take_place() for _ in range(4)] == [WINDOW, WINDOW, 0, 0]
    awake.leave_place(0)
    assert awake.take_place() == 0
    awake.leave_place(WINDOW)
    assert [awake.take_place() for _ in range(2)] == [WINDOW, 0]
    unlimited = AwakeLoop(Turns(), BusyPoll(WINDOW))
    assert {unlimited.take_place() for _ in range(100)} == {WINDOW}
