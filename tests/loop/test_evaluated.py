"""Held-out problems in a live run, as a user asks for them, and the run's models out of it: into
plain transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from streamrl.config.sections.serving import Inference
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.reading import read
from streamrl.stream.records import Evaluation, Record, Rollout
from streamrl.stream.records.compact import wide_logprobs
from tests.loop.runs import ROOT, Live, live
from tests.support.parity import learner_logprobs
from tests.support.waiting import patience

pytestmark = [pytest.mark.live, pytest.mark.slow]

SCORES = """
import sys, json, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
asked = [{"role": "user", "content": "47="}]
assert tokenizer.apply_chat_template(asked)["input_ids"] == [1, 8, 11, 15]
for ids in json.load(sys.stdin):
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    print(json.dumps([logprobs[i, token].item() for i, token in enumerate(ids[1:])]))
"""


def topic(run: Live, name: str) -> list[Record]:
    """The records of a topic of a stopped run."""
    with connect.connect_or_start(run.run) as kafka:
        log = KafkaLog(kafka, run.run.run)
        messages = [m for p in range(log.topics()[name]) for m in read(log, name, p)]
        log.close()
    return [
        record
        for m in messages
        if isinstance(record := to_event(m, ("rollout", "evaluation")).record, Record)
    ]


def by_transformers(directory: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    asked = json.dumps([[int(token) for token in ids] for ids in sequences])
    command = [str(Inference().interpreter), "-c", SCORES, str(directory)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=patience(300), env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [np.array(json.loads(line)) for line in done.stdout.splitlines()]


def test_policies_are_evaluated_while_they_learn_and_afterwards_and_leave_as_models(tmp_path: Path):
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / "evaluated.yaml").read_text())
    with live(tmp_path, settings) as run:
        run.up()
        ended = run.wait(900)
        evals = run.report()["evals"]["copy-digits"]
        print(
            f"exit {ended}, {run.report()['steps']} steps in {run.report()['wall_s']:.0f} s:"
            f" {evals}"
        )
        assert ended == 0, run.said()
        run.nothing_left()
        assert [made["version"] for made in evals] == list(range(0, 20 * len(evals), 20)) and len(
            evals
        ) >= 3
        assert evals[-1]["reward"][1] > evals[0]["reward"][2], (
            "the intervals of the first and the last policy meet"
        )

        newest = run.report()["policy_version"]
        asked = run.command(
            "eval",
            str(run.file),
            "--version",
            str(newest),
            "--set",
            "eval.envs.copy-digits.samples=16",
            timeout_s=400,
        )
        print(asked.stdout)
        assert asked.returncode == 0, asked.stderr
        run.nothing_left()

        records = topic(run, "evals")
        trained = topic(run, "rollouts.copy-digits")
        made = [record for record in records if isinstance(record, Evaluation)]
        answers = [record for record in records if isinstance(record, Rollout)]
        assert (
            made[-1].version == newest
            and made[-1].samples.tolist() == [16] * 20
            and sum(int(m.samples.sum()) for m in made) == len(answers)
        )
        held = {answer.turns[0].message for answer in answers}
        posed = {
            record.turns[0].message
            for record in trained
            if isinstance(record, Rollout) and record.turns
        }
        assert len(held) == 20 and len(posed) >= 70 and not held & posed

        shutil.rmtree(run.run.directory / "weights" / "lead" / "v000020", ignore_errors=True)
        for version, how in ((newest, "from the store"), (20, "computed again")):
            out = tmp_path / f"model-{version}"
            done = run.command(
                "export-model",
                str(run.file),
                "--version",
                str(version),
                "--to",
                str(out),
                timeout_s=400,
            )
            assert done.returncode == 0 and how in done.stdout, done.stdout + done.stderr
            chosen = [answer for answer in answers if answer.policy_version == version][:64]
            sequences = [
                np.concatenate([turn.tokens for turn in answer.turns if turn.tokens is not None])
                for answer in chosen
            ]
            ours = learner_logprobs(out, sequences, 1.0, 64)
            theirs = by_transformers(out, sequences)
            off = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
            served = learner_logprobs(out, sequences, 0.7, 64)
            said = max(
                float(np.abs(s[-len(t) :] - wide_logprobs(t)).max())
                for s, answer in zip(served, chosen, strict=True)
                if (t := answer.turns[1].logprobs) is not None
            )
            print(
                f"version {version}, {how}: {len(chosen)} answers, transformers off by {off:.1e},"
                f" the evaluator's server by {said:.1e}"
            )
            assert len(chosen) == 64 and off <= 1e-4 and said <= 1e-4 + 1 / 4096
