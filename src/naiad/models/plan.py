"""What should happen next to each model: a pure function of what is wanted and what is there.

`plan` is called after any event - a scan, a load request, the end of a load, the death of a member - and says which
steps can be taken now. It is stateless and idempotent: calling it twice does no harm, and what cannot be done yet
is simply not in the answer.

A model is updated as a whole: all its wanted versions are loaded next to the ones that serve, and when all are READY
they take over together; if one fails, the new ones go and the old ones stay (reference R1-40, R1-41). The table:

    wanted          there                                  step
    generation G    nothing, or serves another one         Update to G     (an ensemble: once its members serve)
    generation G    loads G, or serves G                   -
    generation G    loads another one                      -               (asked again when that load ends)
    generation G    G failed before                        -               (until the files change, somebody insists, or
                                                           `retry` forgets the failure)
    generation G    a member is not wanted or failed,      Block, with the reason
                    or it is a member of itself
    nothing         loads                                  Abandon
    nothing         serves, is blocked, or has failed      Retire
"""

from collections.abc import Callable, Mapping

import msgspec


class Wanted(msgspec.Struct, frozen=True):
    """A model that ought to serve. `generation` identifies its configuration and files; `members` are the models an
    ensemble is made of."""

    generation: object
    members: tuple[str, ...] = ()


class Actual(msgspec.Struct, frozen=True):
    """What is there of a model. Each is the generation in that state, or None."""

    serving: object = None
    loading: object = None
    failed: object = None
    blocked: bool = False


class Update(msgspec.Struct, frozen=True):
    name: str


class Block(msgspec.Struct, frozen=True):
    """The model cannot serve because of its members: those that are `unavailable`, or a circle that they make."""

    name: str
    unavailable: tuple[str, ...]


class Abandon(msgspec.Struct, frozen=True):
    """Drop the load when it ends."""

    name: str


class Retire(msgspec.Struct, frozen=True):
    name: str


Step = Update | Block | Abandon | Retire
_NOTHING = Actual()


def plan(wanted: Mapping[str, Wanted], actual: Mapping[str, Actual]) -> list[Step]:
    """The steps that can be taken now, members before the ensembles made of them."""
    steps: list[Step] = []
    for name in sorted(actual.keys() - wanted.keys()):
        there = actual[name]
        if there.loading is not None:
            steps.append(Abandon(name))
        if there.serving is not None or there.blocked or there.failed is not None:
            steps.append(Retire(name))
    for name in sorted(wanted):
        step = _step(name, wanted, actual)
        if step is not None:
            steps.append(step)
    return steps


def _step(name: str, wanted: Mapping[str, Wanted], actual: Mapping[str, Actual]) -> Step | None:
    want = wanted[name]
    there = actual.get(name, _NOTHING)
    if there.loading is not None:
        return None
    lost = tuple(member for member in want.members if _is_lost(member, wanted, actual))
    if lost or circle(name, lambda member: wanted[member].members if member in wanted else ()):
        return None if there.blocked and there.serving is None else Block(name, lost)
    if want.generation in (there.serving, there.failed):
        return None
    if all(_serves(member, wanted, actual) for member in want.members):
        return Update(name)
    return None


def _serves(name: str, wanted: Mapping[str, Wanted], actual: Mapping[str, Actual]) -> bool:
    """The model serves and nothing newer is on its way, or the newer one has failed."""
    there = actual.get(name, _NOTHING)
    if there.serving is None or there.loading is not None:
        return False
    return wanted[name].generation in (there.serving, there.failed)


def _is_lost(name: str, wanted: Mapping[str, Wanted], actual: Mapping[str, Actual]) -> bool:
    """The model does not serve and nothing is under way that would change it."""
    if name not in wanted:
        return True
    there = actual.get(name, _NOTHING)
    if there.serving is not None or there.loading is not None:
        return False
    return there.blocked or there.failed == wanted[name].generation


def circle(name: str, members_of: Callable[[str], tuple[str, ...]]) -> str | None:
    """The ensemble that has `name` for a member and is itself, over any number of others, a member of it."""
    seen: set[str] = set()
    waiting = list(members_of(name))
    while waiting:
        if (member := waiting.pop()) not in seen:
            seen.add(member)
            inside = members_of(member)
            if name in inside:
                return member
            waiting += inside
    return None
