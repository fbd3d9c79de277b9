"""Which instances stay, go and come when instance groups change, as tables; and when that is all that changes."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naiad.config.model_config import InstanceGroup, ModelConfig, Resource
from naiad.config.parse import parse_text
from naiad.config.read import Draft
from naiad.errors import InvalidArgument
from naiad.models.placement import exchange, needs_only_instances, only_gpu, placed_instances
from naiad.models.table import Source
from naiad.repository.snapshot import ModelDirectory, VersionDirectory


def config(groups):
    return ModelConfig(parse_text(f'name: "m" backend: "b" {groups}'))


def placed(groups):
    return placed_instances(config(groups))


def cpu(count, name="m_0", more=""):
    return f'instance_group {{ name: "{name}" kind: KIND_CPU count: {count} {more} }} '


def gpu(count, *gpus, name="g"):
    return f'instance_group {{ name: "{name}" kind: KIND_GPU count: {count} gpus: {list(gpus)} }} '


RATE = "rate_limiter { resources { name: 'R' count: 2 } }"
PRIORITY = "rate_limiter { priority: 2 }"


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (cpu(2), ["m_0_0", "m_0_1"]),
        (cpu(1) + cpu(1, "x"), ["m_0_0", "x_0"]),
        (cpu(2, more="passive: true") + cpu(1, "x"), ["x_0"]),
        (cpu(2, "x") + cpu(1, "x"), ["x_0", "x_1", "x_2"]),
        (gpu(1, 0, 0), ["g_0_gpu0", "g_1_gpu0"]),
        (gpu(2, 3), ["g_0", "g_1"]),
        (gpu(2, 0, 1), ["g_0_gpu0", "g_0_gpu1", "g_1_gpu0", "g_1_gpu1"]),
    ],
)
def test_instances_as_triton_names_them(groups, names):
    assert [context.name for _, context in placed(groups)] == names


@pytest.mark.parametrize(
    ("groups", "device"),
    [
        (gpu(2, 3), 3),
        (gpu(1, 0) + gpu(2, 0, name="h"), 0),
        (gpu(1, 0, 1), None),
        (gpu(1, 0) + cpu(1), None),
        (cpu(2), None),
        (cpu(1, more="passive: true"), None),
    ],
)
def test_the_gpu_where_all_instances_are(groups, device):
    assert only_gpu(config(groups)) == device


@pytest.mark.parametrize(
    ("before", "after", "kept", "removed", "added"),
    [
        pytest.param(cpu(2), cpu(2), [0, 1], [], [], id="nothing changes"),
        pytest.param(cpu(1), cpu(3), [0], [], ["m_0_1", "m_0_2"], id="more"),
        pytest.param(cpu(3), cpu(1), [0], [1, 2], [], id="fewer: the last ones go"),
        pytest.param(cpu(2), cpu(2, "x"), [0, 1], [], [], id="another name of the group"),
        pytest.param(cpu(2), cpu(3, "x"), [0, 1], [], ["x_2"], id="another name and more"),
        pytest.param(cpu(2), cpu(1, "x") + cpu(1, "y"), [0, 1], [], [], id="one group becomes two"),
        pytest.param(cpu(1, "x") + cpu(1, "y"), cpu(2, "z"), [0, 1], [], [], id="two groups become one"),
        pytest.param(cpu(1, "x") + cpu(1, "y"), cpu(1, "y"), [1], [0], [], id="a group goes: the name stays"),
        pytest.param(cpu(1) + gpu(1, 0), gpu(1, 0) + cpu(1), [0, 1], [], [], id="another order"),
        pytest.param(cpu(2), gpu(1, 0), [], [0, 1], ["g_0"], id="another kind"),
        pytest.param(gpu(1, 0), gpu(1, 1), [], [0], ["g_0"], id="another device"),
        pytest.param(gpu(1, 0), gpu(1, 0, 1), [], [0], ["g_0_gpu0", "g_0_gpu1"], id="another set of devices"),
        pytest.param(gpu(1, 0, 1), gpu(2, 0, 1), [0, 1], [], ["g_1_gpu0", "g_1_gpu1"], id="more on each device"),
        pytest.param(cpu(1), cpu(1, more=RATE), [], [0], ["m_0_0"], id="other resources"),
        pytest.param(cpu(1), cpu(1, more=PRIORITY), [], [0], ["m_0_0"], id="another priority"),
        pytest.param(cpu(1), cpu(1, more="host_policy: 'p'"), [], [0], ["m_0_0"], id="another host policy"),
        pytest.param(cpu(1), cpu(1, more="passive: true"), [], [0], [], id="no instance that serves"),
        pytest.param(cpu(2), cpu(1, "x") + cpu(1, more=RATE), [0], [1], ["m_0_1"], id="the name of a new one is taken"),
    ],
)
def test_exchange(before, after, kept, removed, added):
    change = exchange(placed(before), placed(after))
    assert (change.kept, change.removed, [context.name for _, context in change.added]) == (kept, removed, added)


def test_an_instance_that_serves_no_more_is_replaced():
    change = exchange(placed(cpu(2)), placed(cpu(2)), lost=[0])
    assert (change.kept, change.removed) == ([1], [0])
    assert [context.name for _, context in change.added] == ["m_0_0"]


def test_updates_of_updates_give_no_name_twice():
    there = placed(cpu(3))
    for groups in (cpu(1, "x"), cpu(4), cpu(1, "y", RATE) + cpu(2), cpu(3, "y", RATE), cpu(2, "y") + cpu(2, "x", RATE)):
        change = exchange(there, placed(groups))
        there = [there[position] for position in change.kept] + change.added
        names = [context.name for _, context in there]
        assert len(names) == len(set(names)) == len(placed(groups))


groups_of_any_kind = st.lists(
    st.builds(
        InstanceGroup,
        st.sampled_from(["a", "b", "c"]),
        st.just("KIND_GPU"),
        st.integers(1, 3),
        gpus=st.sampled_from([(0,), (1,), (0, 1)]),
        resources=st.sampled_from([(), (Resource("R", 1),)]),
    ),
    max_size=4,
    unique_by=lambda group: group.name,
)


@given(groups_of_any_kind, groups_of_any_kind)
def test_after_an_exchange_there_is_what_was_wanted(before, after):
    def instances(groups):
        fake = config("")
        fake.instance_groups = tuple(groups)
        return placed_instances(fake)

    def kinds(placed):
        return sorted(repr((replace(group, name="", count=0), context.device_id)) for group, context in placed)

    there, wanted = instances(before), instances(after)
    change = exchange(there, wanted)
    now = [there[position] for position in change.kept] + change.added
    assert kinds(now) == kinds(wanted)
    assert sorted(change.kept + change.removed) == list(range(len(there)))
    # Nothing goes that could have stayed.
    assert not set(kinds(there[position] for position in change.removed)) & set(kinds(change.added))
    assert len({context.name for _, context in now}) == len(now)
    assert exchange(now, wanted).added == []


# ---------------------------------------------------------------- when it is all that changes


def source(text, *, files="f", version="v", folder="/r/m", override=None, made_of_request=False):
    proto = parse_text(f'name: "m" backend: "b" {text}')
    directory = Path(folder)
    versions = {1: VersionDirectory(1, directory / "1", version)}
    draft = Draft("m", directory, proto, True, "")
    return Source(ModelDirectory("m", "/r", directory, files, versions), draft, override, made_of_request)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        pytest.param(source(cpu(2)), True, id="instance groups"),
        pytest.param(source(cpu(1)), True, id="nothing"),
        pytest.param(source(cpu(1) + "version_policy { all { } }"), True, id="version policy"),
        pytest.param(source(cpu(2), override="{}"), True, id="by a load request"),
        pytest.param(source(cpu(2) + "max_batch_size: 4"), False, id="something else too"),
        pytest.param(source(cpu(2), files="g"), False, id="labels, say"),
        pytest.param(source(cpu(2), version="w"), False, id="the model's file"),
        pytest.param(source(cpu(2), folder="/s/m"), False, id="another repository"),
        pytest.param(source(cpu(2), made_of_request=True), False, id="files in the request"),
        pytest.param(source(cpu(2) + "max_batch_size: 8"), True, id="what the backend has completed, as shown"),
    ],
)
def test_what_needs_other_instances_only(new, expected):
    running = config(cpu(1) + "max_batch_size: 8")
    assert needs_only_instances(running, source(cpu(1)), new, 1) is expected


def test_a_version_made_of_files_in_a_request_is_always_loaded_again():
    old = source(cpu(1), made_of_request=True)
    assert not needs_only_instances(config(cpu(1)), old, source(cpu(2)), 1)
    broken = source(cpu(1))
    broken.draft = InvalidArgument("broken")
    assert not needs_only_instances(config(cpu(1)), source(cpu(1)), broken, 1)
    assert not needs_only_instances(config(cpu(1)), broken, source(cpu(1)), 1)


def test_an_ensemble_is_always_loaded_again():
    ensemble = source('platform: "ensemble" ensemble_scheduling { }')
    assert not needs_only_instances(config("ensemble_scheduling { }"), ensemble, ensemble, 1)
