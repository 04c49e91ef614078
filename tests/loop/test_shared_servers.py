"""Two runs with adapters on one base and one server: each learns its own task from answers of its
own adapters, and one goes on when the other is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.records import PolicyVersion, Rollout, Server
from tests.loop.runs import Live, live, metric_values

VERSIONS = 3
TASKS = {"copy-digits": {"max_tokens": 3}, "add-digits": {"max_tokens": 2}}
# Nats a token, in float32. Between a version of such a run and the next one there are 5e-5.
MISMATCH = 1e-8
KEYS = {"owner": "STREAMRL_TEST_OWNER_KEY", "guest": "STREAMRL_TEST_GUEST_KEY"}


def settings(directory: Path, name: str, env: str, kafka: str, **inference: Any) -> dict[str, Any]:
    return {
        "run": name,
        "kafka": {"bootstrap.servers": kafka},
        "envs": {env: TASKS[env]},
        # Every batch is sampled by the version that it is trained at.
        "buffer": {"group_size": 8, "min_group_size": 4, "max_age": 0},
        "batcher": {"total_token_budget": 512, "max_seq_len": 64, "lookahead": 0},
        "model": {"max_seq_len": 64},
        "learner": {"learning_rate": 1.0e-2, "lora": {"rank": 8, "alpha": 16}},
        "weights": {"store": f"file://{directory}/weights"},
        "inference": {"max_model_len": 64, **inference},
    }


@pytest.fixture
def runs(
    tmp_path: Path, broker: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Live, Live]]:
    """One that owns the server, and one that has none. Each has its own key there."""
    first = f"{run_name}-a"
    second = f"{run_name}-b"
    for name, variable in KEYS.items():
        monkeypatch.setenv(variable, f"a-key-of-the-{name}")
    owner_key, guest_key = (f"env:{variable}" for variable in KEYS.values())
    guests = {second: {"api_key": guest_key}}
    owns = settings(tmp_path, first, "copy-digits", broker, api_key=owner_key, also_serves=guests)
    borrows = settings(
        tmp_path, second, "add-digits", broker, api_key=guest_key, served_by=[first], replicas=0
    )
    with ExitStack() as stack:
        made: list[Live] = []
        for name, file in (("a", owns), ("b", borrows)):
            (tmp_path / name).mkdir()
            made.append(stack.enter_context(live(tmp_path / name, file)))
        yield made[0], made[1]


def is_served(run: Live, version: int) -> bool:
    servers = run.records("servers", "server")
    return any(isinstance(server, Server) and server.version >= version for server in servers)


@pytest.mark.live
@pytest.mark.slow
def test_two_learners_share_a_server_and_neither_stops_the_other(runs: tuple[Live, Live]):
    owner, guest = runs
    for run in runs:
        run.up()
    for run in runs:
        run.until(lambda run=run: is_served(run, VERSIONS), f"version {VERSIONS} on servers", 600)
    guest.close()
    owner.advances(2, "of the run that is left", 240)

    for run in runs:  # by the owner's server, which tells the runs apart by their keys
        answers = max(metric_values(owner, f"inference/answers/{run.run.run}"))
        requests = max(metric_values(owner, f"inference/requests/{run.run.run}"))
        assert answers >= requests > 0

    for run, server in ((owner, "inference-0"), (guest, f"{owner.run.run}.inference-0")):
        seen = [record for record in run.records("servers", "server") if isinstance(record, Server)]
        assert {record.server_id for record in seen} == {server}
        assert not [record.error for record in seen if record.error]
        assert max(record.mismatch_max_abs for record in seen) < run.run.inference.probe_tolerance
        (env,) = run.run.envs
        rollouts = [
            record
            for record in run.records(f"rollouts.{env}", "rollout")
            if isinstance(record, Rollout)
        ]
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        asked = [turn.inference_metadata for turn in turns if turn.inference_metadata]
        assert {metadata.server for metadata in asked} == {server}
        spans = [metadata.version_spans for metadata in asked]
        assert all(len(found) == 1 for found in spans), "an answer is of one adapter"
        announced = {
            record.version
            for record in run.records("policy-versions", "policy-version")
            if isinstance(record, PolicyVersion)
        }
        sampled = {span.version for found in spans for span in found}
        assert len(sampled) >= VERSIONS and sampled <= announced
        mismatches = metric_values(run, "learner/mismatch_kl")
        assert len(mismatches) >= VERSIONS and max(mismatches) < MISMATCH

        parts = processors_of(run.run)
        account = audit(run.log(), run.run)
        assert account.balanced, account.problems
        for name in ("buffer", "batcher"):
            assert replay(run.log(), parts[name])[0].difference == ""
