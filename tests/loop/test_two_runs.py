"""Two runs with the same envs on one broker, at the same time: each trains on its own rollouts
only, and both balance.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from tests.support.data_path import RUN, parts, play


def test_two_runs_on_one_broker_do_not_meet(broker: str, run_name: str):
    runs = [RUN.model_copy(update={"run": f"{run_name}-{letter}"}) for letter in "ab"]
    for run in runs:
        topic_changes.apply(run, {"bootstrap.servers": broker})
    logs = [KafkaLog({"bootstrap.servers": broker}, run.run) for run in runs]
    with ThreadPoolExecutor() as pool:
        batches = list(pool.map(play, logs, (4, 3)))
    for log, made, rounds in zip(logs, batches, (4, 3), strict=True):
        assert [batch.number for batch in made] == list(range(len(made))) and len(made) >= rounds
        account = audit(log, RUN)
        assert account.balanced, account.problems
        assert account.published == rounds * 2 * 5 * 2  # envs, groups, rollouts of a group
        assert [replay(log, part)[0].difference for part in parts()] == ["", ""]
