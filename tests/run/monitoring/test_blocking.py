import numpy as np
import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring.blocking import blocking_reason
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Fate, FateKind
from tests.run.monitoring.events import event, metric, reward, server, two_envs, version, view_of


@pytest.fixture
def run() -> RunFile:
    return two_envs()


def test_what_it_waits_for(run: RunFile):
    notes = {"learner": "making the model", "inference-0": "vLLM is starting, 20 s"}
    assert (
        blocking_reason(run, view_of(run), 105.0, notes)
        == "waiting 5 s for the first policy version, learner: making the model"
    )
    assert (
        blocking_reason(run, view_of(run, version(0)), 131.0, notes)
        == "waiting 31 s for inference-0: vLLM is starting, 20 s"
    )
    assert (
        blocking_reason(
            run, view_of(run, version(0), server("error", -1, error="bad hash")), 131.0, notes
        )
        == "waiting 31 s for inference-0: bad hash"
    )
    begun = [version(0), server(), metric({"batcher/missing_tokens/add": 1200.0}, time_s=111.0)]
    assert (
        blocking_reason(run, view_of(run, *begun), 112.0)
        == "waiting 2 s for the first batch: add is 1,200 tokens short"
    )
    blocked = metric({"batcher/missing_tokens/add": 64.0, "batcher/blocked_s": 3.0}, time_s=119.0)
    assert (
        blocking_reason(run, view_of(run, *begun, reward(0, 0.1), blocked), 120.0)
        == "batch 1 has waited 3 s: add is 64 tokens short"
    )
    assert blocking_reason(run, view_of(run, *begun, reward(0, 0.1)), 120.0) == ""


def test_it_waits_for_every_pool_that_an_env_asks():
    pools = {"evaluation": {"replicas": 2}, "spare": {}}
    run = parse(
        {
            "run": "r",
            "envs": {"copy": {}, "add": {"pool": "evaluation"}},
            "inference": {"replicas": 1, "pools": pools},
        }
    )
    both = "waiting 31 s for inference-0; inference-evaluation-0; inference-evaluation-1"
    assert blocking_reason(run, view_of(run, version(0)), 131.0) == both
    other = server("starting", -1, pool="evaluation")
    assert (
        blocking_reason(run, view_of(run, version(0), server(), other), 131.0)
        == "waiting 31 s for inference-evaluation-0; inference-evaluation-1"
    )
    assert (
        blocking_reason(
            run,
            view_of(
                run,
                version(0),
                server(),
                server(pool="evaluation"),
                metric({"batches/copy/reward/mean": 0.1}, 0),
            ),
            131.0,
        )
        == ""
    )


def fate(kind: FateKind, count: int, cause: str = "") -> Event:
    offsets = np.arange(count)
    batch = 0 if kind == "batched" else None
    record = Fate(
        fate=kind, environment="add", partition=0, offsets=offsets, batch=batch, cause=cause
    )
    return event("fates", "add", record)


@pytest.mark.parametrize("filtered", [4, 5, 90])
def test_a_shortage_of_an_env_whose_groups_are_filtered_gives_that_as_its_reason(
    run: RunFile, filtered: int
):
    """Five other rollouts were batched, so with 4 or 5 filtered ones it is not most of them."""
    events = [
        version(0),
        server(),
        metric({"batcher/missing_tokens/add": 1200.0}, time_s=111.0),
        fate("batched", 5),
        fate("filtered", filtered, "every reward of the group is the same"),
    ]
    reason = blocking_reason(run, view_of(run, *events), 112.0)
    short = "waiting 2 s for the first batch: add is 1,200 tokens short"
    assert reason == short + (
        "; 90 of 95 rollouts of add were filtered: every reward of the group is the same"
        if filtered == 90
        else ""
    )
