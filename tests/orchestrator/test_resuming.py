"""Every setting of the run file, changed in a run that is gone on with: it works, or is refused in
a sentence.
"""

from __future__ import annotations

import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.errors import ConfigError
from streamrl.log.codec import to_event
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Log, Message, Output, partitions_of, read
from streamrl.orchestrator.resuming import refusals
from streamrl.orchestrator.run_directory import take
from streamrl.processor.reconcile import reconcile
from streamrl.processor.restore import restore
from streamrl.processor.transaction import process_batch
from streamrl.records import Batch
from tests.support.build import group
from tests.support.data_path import RUN, TOPICS, announce, parts, play, publish, send_groups

REFUSED = {
    "model.path": "every version is trained from that model; begin a new run, or fork this one",
    "model.tiny.layers": "the model is made at the run's beginning; begin a new run, or fork this one",
    "model.tiny.hidden": "the model is made at the run's beginning",
    "model.tiny.head_dim": "the model is made at the run's beginning",
    "model.tiny.alphabet": "the model is made at the run's beginning",
    "model.tiny.chat": "the model is made at the run's beginning",
    "model.tiny.seed": "the model is made at the run's beginning",
    "model.max_seq_len": "the model was made for 10",
    "learner.name": "buffer, batcher and servers follow the versions of that learner",
}
OWN_TEST = {
    "run": "another name is another run: tests/orchestrator/test_run_directory.py",
    "runs_dir": "the directory has to be there: tests/orchestrator/test_run_directory.py",
    "fork": "below",
    "topics.partitions": "refused where a topic has data: tests/log/test_topics.py",
    "topics.replicas": "refused: tests/log/test_topics.py",
    "envs": "added and taken out: tests/processor/test_long_lives.py",
}
# Other values than the defaults of RUN; what does not go alone goes with what it needs. Those of
# part "" are read by a process that keeps nothing.
FOLDED = {
    "envs.*.fraction": ["envs.copy.fraction=0.25"],
    "buffer.group_size": ["buffer.group_size=3"],
    "buffer.min_group_size": ["buffer.group_size=4", "buffer.min_group_size=3"],
    "buffer.max_age": ["buffer.max_age=1"],
    "buffer.max_window_tokens": ["buffer.max_window_tokens=3000000"],
    "buffer.max_invalid_frac": ["buffer.max_invalid_frac=0.25"],
    "buffer.advantage": ["buffer.advantage=grpo"],
    "buffer.zero_advantage": ["buffer.zero_advantage=filter"],
    "buffer.group_wait_s": ["buffer.group_wait_s=7"],
    "buffer.remember_versions": ["buffer.remember_versions=3"],
    "batcher.total_token_budget": ["batcher.total_token_budget=60"],
    "batcher.max_seq_len": ["batcher.max_seq_len=20"],
    "batcher.row_count": ["batcher.row_count=16"],
    "batcher.processes": ["batcher.processes=2"],
    "batcher.balance": ["batcher.balance=flops", "batcher.processes=2"],
    "batcher.lookahead": ["batcher.lookahead=0"],
    "batcher.admission": ["batcher.admission=capacity"],
    "batcher.eta": ["batcher.admission=capacity", "batcher.eta=1"],
    "batcher.on_shortage": ["batcher.on_shortage=spill"],
    "batcher.advantage": ["batcher.advantage=normalize"],
    "batcher.curriculum.kind": [
        "batcher.curriculum.kind=learnability",
        "envs.copy.fraction=0",
        "envs.add.fraction=0",
    ],
    "batcher.shortage_after_s": ["batcher.shortage_after_s=1"],
    "model.hidden": ["model.hidden=64"],
}
STAGES = "{fractions: {copy: 0.5, add: 0.5}, until_batch: 100}, {fractions: {copy: 1.0}}"
BY_STAGES = ["batcher.curriculum.kind=stages", f"batcher.curriculum.stages=[{STAGES}]"]
FOLDED["batcher.curriculum.stages"] = [*BY_STAGES, "envs.copy.fraction=0", "envs.add.fraction=0"]
FOLDED["batcher.curriculum.batches"] = [
    *FOLDED["batcher.curriculum.kind"],
    "batcher.curriculum.batches=3",
]
FOLDED["batcher.curriculum.least"] = [
    *FOLDED["batcher.curriculum.kind"],
    "batcher.curriculum.least=0.2",
]
# by processes without a state of their own: changing it is starting the process with it
READ_AT_THE_START = (
    *("kafka", "imports", "scorer", "weights", "inference", "eval", "orchestrator", "metrics"),
    *("topics.retention_hours", "topics.on_removed", "topics.config"),
    *(
        "envs.*.kind",
        "envs.*.params",
        "envs.*.replicas",
        "envs.*.seed",
        "envs.*.pool",
        "envs.*.temperature",
        "envs.*.top_p",
        "envs.*.top_k",
    ),
    *(
        "envs.*.max_tokens",
        "envs.*.max_groups_in_flight",
        "envs.*.max_groups_per_s",
        "envs.*.max_turns",
        "envs.*.rollout_timeout_s",
    ),
    *(
        "envs.*.env_timeout_s",
        "envs.*.pass_rate",
        "envs.*.rewards",
        "envs.*.reward_weights",
        "envs.*.tool_syntax",
        "envs.*.timeout_s",
    ),
    "envs.*.attempts",
)
# goes on from the checkpoint of a clean stop, or announces a new lineage:
# tests/learner/test_process.py
LEARNER = "learner"


def settings(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every setting of a section, as a dotted path; `*` for names that the run file chooses."""
    for name, field in model.model_fields.items():
        inner = [
            t
            for t in (field.annotation, *typing.get_args(field.annotation))
            if isinstance(t, type) and issubclass(t, BaseModel)
        ]
        if not inner:
            yield f"{path}{name}"
        elif typing.get_origin(field.annotation) is dict and name == "envs" and not path:
            yield from settings(inner[0], f"{path}{name}.*.")
        elif typing.get_origin(field.annotation) in (dict, list):
            yield f"{path}{name}"
        else:
            yield from settings(inner[0], f"{path}{name}.")


def stands(path: str, table: Sequence[str]) -> bool:
    """Is the setting, or a section that it is in, in the table?"""
    return any(path == known or path.startswith(f"{known}.") for known in table)


def test_every_setting_stands_in_one_of_the_tables():
    """A new one fails here: say what changing it does to a run that is gone on with, and show it."""
    tables = [[*REFUSED], [*OWN_TEST], [*FOLDED], READ_AT_THE_START]
    wrong = dict[str, int]()
    for path in settings(RunFile):
        count = sum(stands(path, table) for table in tables) + (
            path.startswith(f"{LEARNER}.") and path != "learner.name"
        )
        if count != 1 and not (path.startswith("envs.") and count == 2 and stands(path, ["envs"])):
            wrong[path] = count
    assert wrong == {}


@pytest.fixture(scope="module")
def log() -> Log:
    """A short run of buffer and batcher that has ended, and what comes for them afterwards."""
    made = MemoryLog(TOPICS)
    play(made)
    announce(made, 4)
    for env in RUN.envs:
        send_groups(made, env, range(50, 60), 4, size=4)
        publish(
            made,
            *(
                Output(
                    topology.groups(env),
                    f"{env}-new-{n}",
                    group(env, f"{env}-new-{n}", sizes=(3, 3), version=4),
                )
                for n in range(20)
            ),
        )
    return made


def outputs_of_the_next_life(log: Log, run: RunFile) -> list[Message]:
    """Of buffer and batcher, started again under these settings and given all that there is."""
    written = list[Message]()

    def commit(messages: Sequence[Message]) -> int:
        written.extend(messages)
        return 1_000_000

    for part in parts(run):
        fold, _ = restore(log, part)
        begin = log.beginning_offsets(partitions_of(log, part.inputs))
        list(reconcile(log, part, fold, begin, time.time(), commit))
        positions = {
            where: max(fold.offsets.get(where, first), first) for where, first in begin.items()
        }
        fold.offsets.update(positions)
        messages = [
            message
            for (topic, partition), start in positions.items()
            for message in read(log, topic, partition, start)
        ]
        process_batch(part, fold, messages, time.time(), commit)
    return written


@pytest.mark.parametrize("path", FOLDED)
def test_buffer_and_batcher_go_on_under_the_setting(log: Log, path: str):
    """Restored under the settings of before, they close groups and build a batch under the new one."""
    now = run_file.changed(RUN, FOLDED[path])
    assert now != RUN and list(refusals(RUN, now)) == []
    written = outputs_of_the_next_life(log, now)
    assert any(message.topic.startswith("groups.") for message in written)
    batches = [
        to_event(message, ("batch",)).record for message in written if message.topic == "batches"
    ]
    assert batches and isinstance(batches[0], Batch) and batches[0].number == 4


OTHERS = {
    "model.path": "/elsewhere",
    "model.tiny.chat": "turns",
    "model.tiny.alphabet": "ab",
    "model.max_seq_len": 9,
    "learner.name": "other",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_fixed_for_a_run_is_refused_before_anything_is_changed(path: str, tmp_path: Path):
    run = RUN.model_copy(update={"runs_dir": str(tmp_path)})
    with take(run) as home:
        kept = (home / "run.yaml").read_text()
    now = run_file.changed(run, [f"{path}={OTHERS.get(path, 64)}"])
    named = "model.tiny" if path.startswith("model.tiny.") else path
    says = rf"^{named} cannot be changed in a run that is gone on with: {REFUSED[path]}"
    with pytest.raises(ConfigError, match=says), take(now, resume=True):
        pass
    assert (home / "run.yaml").read_text() == kept
    with take(run_file.changed(run, ["learner.learning_rate=0.5"]), resume=True):
        pass


def test_where_a_fork_came_from_is_refused():
    forked = run_file.changed(RUN, ["fork={run: parent, version: 3, sha256: ab}"])
    assert [said.partition(":")[0] for said in refusals(RUN, forked)] == [
        "fork cannot be changed in a run that is gone on with"
    ]
