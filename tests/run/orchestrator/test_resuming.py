"""Every setting of the run file, changed in a run that is gone on with: it works, or is refused in
a sentence.
"""

from __future__ import annotations

import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.config.sections.section import sections_in
from streamrl.inference.clients import client
from streamrl.run.orchestrator.resuming import refusals
from streamrl.run.orchestrator.run_directory import lock_run_dir, write_run_file
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Message, Output, partitions_of
from streamrl.stream.log.reading import read
from streamrl.stream.processor.reconcile import reconcile
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Batch, EnvProgress
from streamrl.system.errors import ConfigError
from tests.envs.test_process import FakeClient, live, log_for, published, wants
from tests.envs.test_process import run_file as env_run_file
from tests.support.build import group
from tests.support.data_path import RUN, TOPICS, announce, parts, play, publish, send_groups
from tests.support.groups import group_message, joined

REFUSED = {
    "model.path": "every version is trained from that model; begin a new run, or fork this one",
    "model.tiny.layers": (
        "the model is made at the run's beginning; begin a new run, or fork this one"
    ),
    "model.tiny.hidden": "the model is made at the run's beginning",
    "model.tiny.head_dim": "the model is made at the run's beginning",
    "model.tiny.alphabet": "the model is made at the run's beginning",
    "model.tiny.chat": "the model is made at the run's beginning",
    "model.tiny.seed": "the model is made at the run's beginning",
    "model.max_seq_len": "the model was made for 10",
    "learner.name": "buffer, batcher and servers follow the versions of that learner",
    "learner.optimizer": "the optimizer's state in the checkpoints depends on it",
    "learner.beta1": "the optimizer's state in the checkpoints depends on it",
    "learner.beta2": "the optimizer's state in the checkpoints depends on it",
    "learner.lora.rank": "every version is an adapter of that shape, or a whole model",
    "learner.lora.alpha": "every version is an adapter of that shape, or a whole model",
    "learner.lora.targets": "every version is an adapter of that shape, or a whole model",
}
OWN_TEST = {
    "run": "another name is another run: tests/run/orchestrator/test_run_directory.py",
    "runs_dir": "the directory has to be there: tests/run/orchestrator/test_run_directory.py",
    "fork": "below",
    "topics.partitions": (
        "refused where a topic has data: tests/stream/log/kafka/test_topic_changes.py"
    ),
    "topics.replicas": "refused: tests/stream/log/kafka/test_topic_changes.py",
    "buffer.shards": "refused: tests/buffer/test_shards.py",
    "envs": "added and taken out: tests/stream/processor/test_long_lives.py",
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
    "batcher.total_token_budget": ["batcher.total_token_budget=60"],
    "batcher.max_seq_len": ["batcher.max_seq_len=20"],
    "batcher.row_lengths": ["batcher.row_lengths=[5]"],
    "batcher.row_count": ["batcher.row_count=16"],
    "batcher.processes": ["batcher.processes=2"],
    "batcher.balance": ["batcher.balance=flops", "batcher.processes=2"],
    "batcher.lookahead": ["batcher.lookahead=0"],
    "batcher.admission": ["batcher.admission=capacity"],
    "batcher.on_shortage": ["batcher.on_shortage=spill"],
    "batcher.advantage": ["batcher.advantage=normalize"],
    "batcher.curriculum.kind": [
        "batcher.curriculum.kind=learnability",
        "envs.copy.fraction=0",
        "envs.add.fraction=0",
    ],
    "model.hidden": ["model.hidden=64"],
}
STAGES = "{fractions: {copy: 0.5, add: 0.5}, until_batch: 100}, {fractions: {copy: 1.0}}"
BY_STAGES = f"batcher.curriculum={{kind: stages, stages: [{STAGES}]}}"
FOLDED["batcher.curriculum.stages"] = [BY_STAGES, "envs.copy.fraction=0", "envs.add.fraction=0"]
FOLDED["batcher.curriculum.batches"] = [
    *FOLDED["batcher.curriculum.kind"],
    "batcher.curriculum.batches=3",
]
FOLDED["batcher.curriculum.least"] = [
    *FOLDED["batcher.curriculum.kind"],
    "batcher.curriculum.least=0.2",
]
# All of them in one life of the learner: tests/learner/test_process.py
LEARNER = {
    "learner.loss": "clipped-ratio",
    "learner.average": "samples",
    "learner.clip_epsilon": 0.1,
    "learner.clip_epsilon_high": 0.3,
    "learner.clip_ratio_max": 3.0,
    "learner.correction.old_policy": "decoupled",
    "learner.correction.weights.by": "sequence",
    "learner.correction.weights.beyond": "mask",
    "learner.correction.weights.limits": [0.01, 9],
    "learner.correction.reject.distance": "k2",
    "learner.correction.reject.by": "sequence",
    "learner.correction.reject.above": 100,
    "learner.kl.estimator": "k1",
    "learner.kl.coefficient": 0.02,
    "learner.kl.applied_to": "advantages",
    "learner.micro_batch_rows": 1,
    "learner.precision": "bf16",
    "learner.remat": "full",
    "learner.attention": "reference",
    "learner.deterministic": False,
    "learner.logprob_chunk": 5,
    "learner.learning_rate": 0.01,
    "learner.warmup_steps": 3,
    "learner.schedule.kind": "cosine",
    "learner.schedule.steps": 50,
    "learner.schedule.min_ratio": 0.1,
    "learner.weight_decay": 0.1,
    "learner.max_grad_norm": 2,
    "learner.normalize_advantages": False,
    "learner.checkpoint_every": 3,
    "learner.keep_checkpoints": 3,
    "learner.on_divergence": "stop",
    "learner.probe_tokens": 16,
}
OWN_TEST |= {
    "gateway.revoked_before": "needs an env with sessions: tests/envs/sessions/test_keys.py",
    "model.history": (
        "read by who samples, and keeps nothing: tests/extensions/gateway/test_sampling.py"
    ),
    "learner.preset": "sets others, which stand above: tests/config/test_presets.py",
    "learner.mesh": (
        "how devices divide the work changes no result: tests/learner/parallel/test_mesh.py"
    ),
    "learner.teacher": "is in the scores of each batch: tests/extensions/scorer/test_process.py",
    "learner.kl.reference": "a checkpoint has its version: tests/extensions/scorer/test_process.py",
}
# A replica of an env is started with it behind the progress of its earlier life.
ENV = {
    "kind": "add-digits",
    "params": "{digits: 3}",
    "replicas": 2,
    "seed": 5,
    "pool": "more",
    "temperature": 0.5,
    "max_tokens": 5,
    "chat_template_kwargs": "{enable_thinking: false}",
    "max_groups_in_flight": 3,
    "max_groups_per_s": 1000,
    "max_turns": 2,
    "rollout_timeout_s": 9,
    "env_timeout_s": 9,
    "rewards": "{more: {kind: 'tests.run.orchestrator.test_resuming:half'}}",
    "reward_weights": "{correct: 2}",
    "timeout_s": 9,
    "attempts": 2,
}
ENV_OTHERS = {
    "loss": "in the buffer's journaled configuration: tests/buffer/test_process.py",
    "sessions": "the assembler goes on under others: tests/extensions/assembler/test_process.py",
    "python": "its server keeps nothing: tests/envs/servers/inside/test_streamrl_sessions.py",
    "variables": "of such a server: tests/envs/servers/test_process.py",
    "api_key": "of such a server: tests/envs/servers/test_process.py",
    "host": "another process continues: tests/envs/test_host.py",
    "pass_rate": (
        "of envs with a finite set, whose visits are read: tests/envs/test_difficulty_filter.py"
    ),
}
# By processes without a state of their own, which fold nothing and are told nothing of the earlier
# value: changing it is starting the process with it. `STARTED_AGAIN` has a test of each of them.
STARTED_WITH = {
    "kafka": "{linger.ms: 7}",
    "imports": "['json:dumps']",
    "scorer.replicas": 3,
    "learner.processes": 2,
    "learner.checkpoint_copies": "/elsewhere",
    "weights.store": "/elsewhere",
    "weights.keep_versions": 7,
    "inference.replicas": 2,
    "inference.pools": "{more: {dtype: bfloat16}}",
    "inference.python": "/usr/bin/python3",
    "inference.host": "127.0.0.2",
    "inference.port": 8100,
    "inference.api_key": "env:KEY",
    "inference.dtype": "bfloat16",
    "inference.tensor_parallel": 2,
    "inference.engine": "{block_size: 32}",
    "inference.max_model_len": 64,
    "inference.max_num_seqs": 32,
    "inference.also_serves": "{other: {}}",
    "inference.served_by": "[other]",
    "inference.extra_args": "['--block-size', '32']",
    "inference.heartbeat_s": 2,
    "inference.probe_tolerance": 0.01,
    "gateway.replicas": 2,
    "gateway.host": "127.0.0.2",
    "gateway.port": 8800,
    "gateway.url": "https://gateway.example",
    "gateway.signing_secret": "env:KEY",
    "eval.envs": "{copy: {problems: 4}}",
    "eval.every": 7,
    "orchestrator.target.env": "copy",
    "orchestrator.target.reward": 0.5,
    "orchestrator.target.batches": 7,
    "orchestrator.max_steps": 7,
    "orchestrator.max_wall_s": 7,
    "orchestrator.sinks": "[console]",
    "metrics.serve": False,
    "placement": "{learner: {devices: [0]}, inference: {}}",
    "topics.retention_hours": 7,
    "topics.on_removed": "expire",
    "topics.config": "{segment.ms: '7000'}",
}
# Section -> a test whose part has a life under one value, and another one under another value.
STARTED_AGAIN = {
    "scorer": (
        "tests/extensions/scorer/test_process.py::test_a_run_goes_on_with_another_number_of_workers"
    ),
    "weights": (
        "tests/learner/test_process.py"
        "::test_other_settings_at_a_resume_go_on_from_the_checkpoint_of_the_clean_stop"
    ),
    "inference": (
        "tests/inference/servers/test_process.py"
        "::test_started_again_it_serves_what_another_tolerance_lets_pass"
    ),
    "eval": (
        "tests/extensions/evaluator/test_process.py::test_started_again_it_follows_another_interval"
    ),
}
WITH_TARGET = ["orchestrator.target={env: add, reward: 0.25}"]
WITH_LORA = ["learner.lora={rank: 8}"]


def needed_by(path: str) -> list[str]:
    """The settings without which this one is refused."""
    if path.startswith("orchestrator.target"):
        return WITH_TARGET
    return WITH_LORA if path == "inference.also_serves" else []


def half(problem: object, answer: object, earned: object) -> float:
    return 0.5


def settings(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every setting of a section, as a dotted path; `*` for names that the run file chooses."""
    for name, field in model.model_fields.items():
        inner = sections_in(field.annotation).values()
        if not inner:
            yield f"{path}{name}"
        elif typing.get_origin(field.annotation) is dict and name == "envs" and not path:
            for section in inner:
                yield from settings(section, f"{path}{name}.*.")
        elif typing.get_origin(field.annotation) in (dict, list):
            yield f"{path}{name}"
        else:
            for section in inner:
                yield from settings(section, f"{path}{name}.")


def stands(path: str, table: Sequence[str]) -> bool:
    """Is the setting, or a section that it is in, in the table?"""
    return any(path == known or path.startswith(f"{known}.") for known in table)


def test_every_setting_stands_in_one_of_the_tables():
    """A new one fails here: say what changing it does to a run that is gone on with, and
    show it.
    """
    of_envs = [f"envs.*.{name}" for name in (*ENV, *ENV_OTHERS)]
    whole = [*REFUSED, *FOLDED, *LEARNER, *STARTED_WITH, *of_envs[: len(ENV)]]
    sections = [name for name in OWN_TEST if name != "envs"] + of_envs[len(ENV) :]
    sections += ["envs.*.buffer"]  # as `buffer`: tests/buffer/test_process.py
    wrong = {
        path: count
        for path in settings(RunFile)
        if (count := (path in whole) + stands(path, sections)) != 1
    }
    assert wrong == {}
    assert set(whole) <= set(settings(RunFile)), "a setting that is not there any more"


@pytest.fixture(scope="module")
def log() -> Log:
    """A short run of buffer and batcher that has ended, and what comes for them afterwards."""
    made = MemoryLog(TOPICS)
    play(made)
    announce(made, 5)
    for env in RUN.envs:
        send_groups(made, env, range(50, 60), 5, size=4)
        for n in range(20):
            new = group(env, f"{env}-new-{n}", sizes=(3, 3), version=5)
            made.append([group_message(made, new)], marker=False)
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
        assert isinstance(log, MemoryLog)
        process_batch(part, fold, joined(log, part, messages), time.time(), commit)
    return written


@pytest.mark.parametrize("path", FOLDED)
def test_buffer_and_batcher_go_on_under_the_setting(log: Log, path: str):
    """Restored under the settings of before, they close groups and build a batch under the
    new one.
    """
    now = run_file.with_overrides(RUN, FOLDED[path])
    assert now != RUN and list(refusals(RUN, now)) == []
    written = outputs_of_the_next_life(log, now)
    assert any(message.topic.startswith("groups.") for message in written)
    batches = [
        to_event(message, ("batch",)).record for message in written if message.topic == "batches"
    ]
    assert batches and isinstance(batches[0], Batch) and batches[0].number == 5


@pytest.mark.parametrize("path", STARTED_WITH)
def test_a_process_that_keeps_nothing_is_started_with_the_setting(path: str):
    """It is not refused, and what buffer and batcher are told of it they take in as they go on."""
    before = run_file.with_overrides(RUN, needed_by(path))
    now = run_file.with_overrides(before, [f"{path}={STARTED_WITH[path]}"])
    assert now != before and list(refusals(before, now)) == []
    for then, part in zip(parts(before), parts(now), strict=True):
        assert part.config == then.config and type(part.initial()) is type(then.initial())


@pytest.mark.parametrize("section", STARTED_AGAIN)
def test_its_part_is_started_again_with_another_value_in_a_test_of_its_own(section: str):
    file, _, name = STARTED_AGAIN[section].partition("::")
    assert any(path.startswith(f"{section}.") for path in STARTED_WITH)
    assert f"\ndef {name}(" in (Path(__file__).parents[3] / file).read_text()


@pytest.mark.parametrize("name", ENV)
def test_an_env_goes_on_under_the_setting_behind_what_it_has_published(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "Client", FakeClient)
    log = log_for(2)
    journal = "journal.env-copy-digits-0"
    known = EnvProgress(producer="copy-digits-0", next_problem=8, published_groups=8, replicas=1)
    publish(log, Output(journal, "copy-digits-0", known))
    wants(log, 10**6, {"copy-digits-0": 8})
    before = env_run_file()
    more = ["inference.pools={more: {}}"] if name == "pool" else []
    now = run_file.with_overrides(before, [f"envs.copy-digits.{name}={ENV[name]}", *more])
    assert now != before and list(refusals(before, now)) == []
    live(log, now, lambda: len(published(log)) >= 4)
    assert all(int(made.group_id.rpartition("-")[2]) >= 8 for made in published(log))


OTHERS = {
    "model.path": "/elsewhere",
    "model.tiny.chat": "turns",
    "model.tiny.alphabet": "ab",
    "model.max_seq_len": 9,
    "learner.name": "other",
    "learner.optimizer": "lion",
    "learner.beta1": 0.5,
    "learner.beta2": 0.5,
    "learner.lora.targets": "[q_proj]",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_fixed_for_a_run_is_refused_before_anything_is_changed(path: str, tmp_path: Path):
    lora = WITH_LORA if path.startswith("learner.lora.") else []
    before = run_file.with_overrides(RUN, lora)
    run = before.model_copy(update={"runs_dir": str(tmp_path)})
    with lock_run_dir(run) as home:
        kept = (home / "run.yaml").read_text()
    now = run_file.with_overrides(run, [f"{path}={OTHERS.get(path, 64)}"])
    section = path.rpartition(".")[0]
    named = section if section in ("model.tiny", "learner.lora") else path
    says = rf"^{named} cannot be changed in a run that is gone on with: {REFUSED[path]}"
    with pytest.raises(ConfigError, match=says), lock_run_dir(now, resume=True):
        pass
    assert (home / "run.yaml").read_text() == kept
    with lock_run_dir(run_file.with_overrides(run, ["learner.learning_rate=0.5"]), resume=True):
        pass


def test_where_a_fork_came_from_is_refused():
    forked = run_file.with_overrides(RUN, ["fork={run: parent, version: 3, sha256: ab}"])
    assert [said.partition(":")[0] for said in refusals(RUN, forked)] == [
        "fork cannot be changed in a run that is gone on with"
    ]


SCHEDULES = [
    {"kind": "cosine"},
    {"kind": "linear"},
    {"kind": "linear", "min_ratio": 0.01},
]


def with_more_steps(tmp_path: Path, schedule: dict[str, Any], *more: str) -> dict[str, list[str]]:
    """Why a run of 100 steps cannot be resumed with 200: by the file of its user, by its own."""
    data = {
        "run": "x",
        "runs_dir": str(tmp_path / "runs"),
        "envs": {"copy-digits": {}},
        "orchestrator": {"max_steps": 100},
        "learner": {"learning_rate": 1e-3, "warmup_steps": 0, "schedule": schedule},
    }
    user = tmp_path / "user.yaml"
    user.write_text(yaml.safe_dump(data))
    before = run_file.load(user)
    before.directory.mkdir(parents=True)
    write_run_file(before)
    own = before.directory / run_file.RUN_FILE
    overrides = ["orchestrator.max_steps=200", *more]
    return {
        name: list(refusals(before, run_file.load(path, overrides)))
        for name, path in (("user", user), ("own", own))
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_steps_change_no_rate_of_a_trained_step_and_none_is_0(
    tmp_path: Path, schedule: dict[str, Any]
):
    """The user's file would stretch the schedule. The run's own keeps it, and is refused where the
    further steps would have a rate of 0.
    """
    found = with_more_steps(tmp_path, schedule)
    (stretched,) = found["user"]
    assert stretched.startswith("orchestrator.max_steps 200 would change the learning rates of")
    assert "learner.schedule.steps is 100" in stretched
    if "min_ratio" in schedule:
        assert found["own"] == []
    else:
        (ended,) = found["own"]
        assert "the learning rate would be 0 from step 100 on; raise it" in ended


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_steps_with_a_number_of_steps_for_the_schedule_are_taken(
    tmp_path: Path, schedule: dict[str, Any]
):
    found = with_more_steps(tmp_path, schedule, "learner.schedule.steps=200")
    assert found == {"user": [], "own": []}


def test_a_resume_without_a_change_of_the_schedule_is_taken(tmp_path: Path):
    found = with_more_steps(tmp_path, {"kind": "cosine"}, "orchestrator.max_steps=100")
    assert found == {"user": [], "own": []}
