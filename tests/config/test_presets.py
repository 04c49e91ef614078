from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.config import run_file
from streamrl.config.presets import PRESETS, PRETRAINED
from streamrl.config.run_file import RunFile, parse, parse_resolved, with_overrides
from streamrl.config.sections.learner import DistanceLimit, ImportanceWeights, Kl, Schedule
from streamrl.system.errors import ConfigError


def a_run(**sections: Any) -> dict[str, Any]:
    return {"run": "r", "envs": {"copy": {}}, **sections}


def at(run: RunFile, name: str) -> Any:
    found: Any = run
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_all_of_its_settings(preset: str):
    run = parse(a_run(buffer={"max_age": 0}, learner={"preset": preset}))
    assert {name: at(run, name) for name in PRESETS[preset]} == PRESETS[preset]


def test_what_a_run_file_says_stands_above_the_preset():
    run = parse(
        a_run(buffer={"advantage": "rloo"}, learner={"preset": "dapo", "clip_epsilon": 0.1})
    )
    assert (run.buffer.advantage, run.buffer.zero_advantage) == ("rloo", "filter")
    assert (run.learner.clip_epsilon, run.learner.clip_epsilon_high) == (0.1, 0.28)


def test_so_does_what_it_says_within_a_section():
    correction = {"reject": {"distance": "k3", "above": 0.1}}
    run = parse(a_run(learner={"preset": "rloo", "correction": correction}))
    assert run.learner.correction.weights == ImportanceWeights(by="token")
    assert run.learner.correction.reject == DistanceLimit(distance="k3", above=0.1)


def test_an_env_may_have_an_advantage_of_its_own_beside_a_preset():
    envs = {"copy": {}, "add": {"buffer": {"advantage": "rloo"}}}
    run = parse({"run": "r", "envs": envs, "learner": {"preset": "grpo"}})
    assert [run.buffer_of(name).advantage for name in envs] == ["grpo", "rloo"]


def test_an_unknown_preset_is_named():
    with pytest.raises(ConfigError, match=r"learner.preset: .*dappo.*dapo"):
        parse(a_run(learner={"preset": "dappo"}))


# ---- a pretrained model --------------------------------------------------------------------------


def test_a_pretrained_model_has_defaults_of_its_own():
    run = parse(a_run(model={"path": "/a/model"}))
    assert {name: at(run, name) for name in PRETRAINED} == PRETRAINED
    tiny = parse(a_run())
    assert (tiny.learner.learning_rate, tiny.learner.kl) == (1e-3, Kl(coefficient=0.01))


@pytest.mark.parametrize(
    ("sections", "tolerance"),
    [
        ({}, 1e-3),
        ({"model": {"path": "/a/model"}}, 0.1),
        ({"learner": {"precision": "bf16"}}, 0.1),
        ({"inference": {"dtype": "bfloat16"}}, 0.1),
        ({"inference": {"dtype": "bfloat16", "probe_tolerance": 0.02}}, 0.02),
        (
            {
                "model": {"path": "/a/model"},
                "learner": {"precision": "float32"},
                "inference": {"dtype": "float32"},
            },
            1e-3,
        ),
    ],
)
def test_the_tolerance_of_a_probe_follows_from_the_precision(
    sections: dict[str, Any], tolerance: float
):
    assert parse(a_run(**sections)).inference.probe_tolerance == tolerance


def test_a_preset_stands_above_the_defaults_of_a_pretrained_model():
    run = parse(a_run(model={"path": "/a/model"}, learner={"preset": "grpo"}))
    assert run.learner.kl == Kl(coefficient=0.04)
    assert run.learner.learning_rate == 1e-6


@pytest.mark.parametrize("reference", [{"by": "pool"}, {"every": 5}, {"path": "/another"}])
def test_a_pretrained_model_with_a_reference_measures_the_divergence(reference: dict[str, Any]):
    run = parse(a_run(model={"path": "/a/model"}, learner={"kl": {"reference": reference}}))
    assert run.learner.kl and run.learner.kl.coefficient == 0.01
    assert run.learner.reference == run.learner.kl.reference


# ---- resolved run files --------------------------------------------------------------------------

RESOLVED = {
    "model": {"path": "/a/model"},
    "learner": {"preset": "grpo-on-policy", "loss": "ppo"},
}


def test_a_resolved_run_file_gets_no_setting_of_its_preset():
    """It has every setting, so its preset and its pretrained model change none."""
    run = parse_resolved(a_run(**RESOLVED), "config")
    assert (run.learner.learning_rate, run.learner.kl) == (1e-3, Kl())
    assert (run.learner.loss, run.learner.average) == ("ppo", "")


def test_so_does_one_that_a_run_keeps_wherever_it_is(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({run_file.RESOLVED: True, **a_run(**RESOLVED)}))
    kept, is_of_run = run_file.load_with_origin(path, ["buffer.max_age=0"])
    assert (kept.learner.learning_rate, kept.learner.loss) == (1e-3, "ppo")
    assert is_of_run


def test_a_run_file_in_a_directory_of_its_name_gets_them(tmp_path: Path):
    settings = a_run(**RESOLVED)
    path = tmp_path / settings["run"] / run_file.RUN_FILE
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(settings))
    filled_up, is_of_run = run_file.load_with_origin(path)
    assert filled_up.learner.learning_rate == 1e-6
    assert not is_of_run


def test_a_resolved_run_file_gives_the_same_run():
    run = parse(a_run(model={"path": "/a/model"}, learner={"preset": "dapo"}))
    assert parse(run.model_dump(mode="json")) == run
    assert parse_resolved(run.model_dump(mode="json"), "config") == run


def test_a_preset_can_be_chosen_for_a_fork():
    """A run's own file says everything, so the preset comes with all of its settings. Settings
    beside it stand above it, in whatever order.
    """
    run = with_overrides(parse(a_run()), ["learner.clip_epsilon=0.1", "learner.preset=dapo"])
    assert (run.buffer.advantage, run.learner.loss) == ("grpo", "ppo")
    assert (run.learner.normalize_advantages, run.learner.clip_epsilon) == (False, 0.1)


def test_a_schedule_goes_over_all_steps_of_the_run():
    whole = {"orchestrator": {"max_steps": 200}}
    run = parse(a_run(**whole, learner={"schedule": {"kind": "linear"}}))
    assert run.learner.schedule == Schedule(kind="linear", steps=200)
    shorter = {"kind": "linear", "steps": 50, "min_ratio": 0.01}
    own = parse(a_run(**whole, learner={"schedule": shorter}))
    assert own.learner.schedule == Schedule(kind="linear", steps=50, min_ratio=0.01)
    assert parse(a_run(**whole)).learner.schedule is None


def test_a_schedule_that_a_fork_chooses_goes_over_all_of_its_steps():
    parent = parse(a_run(orchestrator={"max_steps": 200}))
    fork = with_overrides(parent, ["learner.schedule.kind=cosine"])
    assert fork.learner.schedule == Schedule(kind="cosine", steps=200)


def test_adapters_of_a_pretrained_model_have_a_higher_learning_rate():
    for lora in ({}, {"rank": 8}):
        run = parse(a_run(model={"path": "/a/model"}, learner={"lora": lora}))
        assert run.learner.learning_rate == 3e-5
        assert (run.learner.precision, run.learner.remat) == ("bf16", "full")
    own = parse(a_run(model={"path": "/a/model"}, learner={"lora": {}, "learning_rate": 1e-5}))
    assert own.learner.learning_rate == 1e-5
    whole = parse(a_run(model={"path": "/a/model"}, learner={"lora": None}))
    assert whole.learner.learning_rate == 1e-6


# ---- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "row", "context"),
    [
        ({}, 2_048, 128),
        ({"model": {"max_seq_len": 64}}, 2_048, 64),
        ({"model": {"max_seq_len": 4_096}}, 4_096, 4_096),
        ({"model": {"max_seq_len": 3_000}}, 3_072, 3_000),
        ({"model": {"max_seq_len": 64}, "inference": {"max_model_len": 32}}, 2_048, 32),
    ],
)
def test_servers_and_rows_hold_the_longest_rollout(
    sections: dict[str, Any], row: int, context: int
):
    run = parse(a_run(**sections, batcher={"total_token_budget": 2**16}))
    assert (run.batcher.max_seq_len, run.inference.max_model_len) == (row, context)
