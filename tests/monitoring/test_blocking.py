import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.monitoring.blocking import blocking_reason
from tests.monitoring.events import metric, reward, server, two_envs, version, view_of


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
    pools = {"evaluation": 2, "spare": 1}
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
