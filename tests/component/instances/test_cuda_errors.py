"""Hosts in which CUDA fails for good are started anew; those in which something else fails are not."""

import numpy as np
import pytest
from instance_lab import Batch, available, config, parameters, request, run, until

from naiad.errors import Internal

STRINGS = config("BYTES", [1])
DECOUPLED = {**STRINGS, "model_transaction_policy": {"decoupled": True}}
ILLEGAL = "CUDA error: an illegal memory access was encountered"


async def say(instance, text):
    [[result]] = await run(instance, request(np.array([text.encode()], object)), rows=[1])
    return result


def output(result):
    return result.outputs["OUTPUT0"].item()


async def load(lab, backend, configuration=STRINGS, **options):
    return await lab.load("", configuration, reference=f"cuda_backends:{backend}", **options)


@pytest.mark.parametrize(
    ("backend", "configuration"),
    [
        ("Arrays", STRINGS),
        ("Requests", STRINGS),
        ("Requests", {**STRINGS, **parameters(how="send")}),
        ("Requests", {**STRINGS, **parameters(how="return")}),
    ],
)
async def test_after_an_error_that_lasts_the_host_is_started_again(lab, backend, configuration):
    model = await load(lab, backend, configuration)
    (instance,) = model.instances
    first = output(await say(instance, ""))
    error = await say(instance, f"700 {ILLEGAL}")
    assert isinstance(error, Internal)
    assert ILLEGAL in error.message
    # Whoever comes next, at once, is served by the next process.
    await available(instance)
    assert output(await say(instance, "")) != first
    assert (model.restarts, instance.failure) == (1, None)
    how = (
        "model 'm' version 1: host process 'm' ended itself, since CUDA fails for good in a process that has met "
        "CUDA_ERROR_700 (unknown) on GPU 0; it is being restarted"
    )
    assert [line[3] for line in lab.logs if line[2] == "ERROR"] == [how]


async def test_an_answer_that_comes_after_its_batch_ends_the_host_too(lab):
    model = await load(lab, "Requests", {**DECOUPLED, **parameters(how="late")})
    (instance,) = model.instances
    assert ILLEGAL in (await say(instance, f"700 {ILLEGAL}")).message
    await until(lambda: model.restarts)
    await available(instance)
    assert output(await say(instance, "")) == str(model.pids[0]).encode()


@pytest.mark.parametrize(
    "error",
    [
        "2 CUDA error: out of memory",  # the driver says so too
        "0 The size of tensor a (3) must match the size of tensor b (4)",
        f"0 {ILLEGAL}",  # words of a client, and CUDA works
        f"- {ILLEGAL}",  # there is no CUDA
    ],
)
@pytest.mark.parametrize("backend", ["Arrays", "Requests"])
async def test_other_errors_leave_the_host_alone(lab, backend, error):
    model = await load(lab, backend)
    (instance,) = model.instances
    first = output(await say(instance, ""))
    for _ in range(2):
        assert error.partition(" ")[2] in (await say(instance, error)).message
    assert output(await say(instance, "")) == first
    assert model.restarts == 0


async def test_what_else_runs_in_the_host_fails_with_the_reason(lab):
    model = await load(lab, "Arrays", instances=2)
    first, second = model.instances
    both = [Batch(request(np.array([f"719 {text}".encode()], object)), rows=[1]) for text in ("one", "other")]
    first.execute(both[0])
    second.execute(both[1])
    errors = [(await batch.ended())[0][0].message for batch in both]
    for error, text in zip(errors, ("one", "other"), strict=True):
        assert error == text or "its host process ended itself, since CUDA fails for good" in error
    for instance in first, second:
        await available(instance)
        assert output(await say(instance, "")) == str(model.pids[0]).encode()
    assert model.restarts == 1


async def test_a_model_that_breaks_cuda_while_it_loads_takes_its_host_with_it(make_lab):
    async with make_lab(isolation="backend") as lab:
        neighbour = await load(lab, "Arrays", name="neighbour")
        (instance,) = neighbour.instances
        first = output(await say(instance, ""))
        with pytest.raises(Internal, match=ILLEGAL):
            await load(lab, "Arrays", {**STRINGS, **parameters(fail=f"700 {ILLEGAL}")}, name="broken")
        await until(lambda: neighbour.restarts)
        await available(instance)
        assert output(await say(instance, "")) != first


@pytest.mark.parametrize(("backend", "started"), [("Early", True), ("Arrays", False)])
async def test_a_backend_that_starts_cuda_where_it_is_imported_is_named(lab, backend, started, capfd):
    await load(lab, backend)
    told = "importing the backend 'test' has started CUDA, which does not survive a fork"
    assert (told in capfd.readouterr().err) == started
