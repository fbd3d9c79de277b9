"""Requests that model code gives back to the scheduler, through real host processes and through threads."""

import asyncio

import numpy as np
import pytest
from instance_lab import Batch, available, config, request, run

from naiad.errors import Internal
from naiad.messages import SequenceControl

ITERATIVE = {"sequence_batching": {"iterative_sequence": True}}


class IterativeBatch(Batch):
    """Notes which requests came back; each counts as answered."""

    def __init__(self, *requests):
        super().__init__(*requests)
        self.again = []

    def reschedule(self, index):
        self.again.append(index)
        self.deliver(index, None, True)


def asking(key, how, times):
    return request(np.array([[how, times]], np.float32), sequence=SequenceControl(key))


async def executed(instance, *requests):
    """(the results of each request, those that came back) of one batch."""
    await available(instance)
    batch = IterativeBatch(*requests)
    instance.execute(batch)
    return await batch.ended(), batch.again


@pytest.mark.parametrize("decoupled", [False, True])
async def test_requests_come_back_while_others_are_answered(both, decoupled):
    more = ITERATIVE | ({"model_transaction_policy": {"decoupled": True}} if decoupled else {})
    model = await both.load("Rescheduling", config(dims=[2], max_batch_size=4, **more))
    (instance,) = model.instances
    requests = [asking(1, 0, 2), asking(2, 0, 0), asking(3, 0, 1)]
    results, again = await executed(instance, *requests)
    assert again == [0, 2]
    assert results[1][0].outputs["OUTPUT0"].tolist() == [[1, 1]]
    results, again = await executed(instance, requests[0], requests[2])
    assert again == [0]
    assert results[1][0].outputs["OUTPUT0"].tolist() == [[2, 2]]
    results, again = await executed(instance, requests[0])
    assert again == []
    assert results[0][0].outputs["OUTPUT0"].tolist() == [[3, 3]]


async def test_a_decoupled_model_may_reschedule_later(both):
    more = ITERATIVE | {"model_transaction_policy": {"decoupled": True}}
    model = await both.load("Rescheduling", config(dims=[2], max_batch_size=4, **more))
    (instance,) = model.instances
    for _ in range(3):
        _, again = await executed(instance, asking(1, 1, 9), asking(2, 1, 9))
        assert sorted(again) == [0, 1]
    # Nothing of them is left open.
    await asyncio.wait_for(model.close(), 20)


@pytest.mark.parametrize(
    ("more", "how", "reason"),
    [({}, 0, "reschedules a request that is no iterative sequence"), (ITERATIVE, 2, "that it has answered")],
)
async def test_what_may_not_be_rescheduled_is_an_error(both, more, how, reason):
    model = await both.load("Rescheduling", config(dims=[2], max_batch_size=4, **more))
    (instance,) = model.instances
    [results] = await run(instance, asking(1, how, 5))
    if how == 2:
        # The answer stands; what the model wanted after it is an error of the execution, which nobody waits for.
        assert results[0].outputs["OUTPUT0"].tolist() == [[2, 5]]
    else:
        assert isinstance(results[0], Internal)
        assert reason in results[0].message
