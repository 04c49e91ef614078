from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import choices, run_file, topology
from streamrl.system.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "deploy" / "runs" / "quickstart.yaml"


def test_the_quickstart_is_a_run_file():
    run = run_file.load(QUICKSTART)
    assert run.run == "quickstart" and set(run.envs) == {"copy-digits", "add-digits"}


def test_a_resolved_run_file_is_a_run_file():
    run = run_file.load(QUICKSTART)
    assert run_file.parse(run.model_dump(mode="json")) == run


def test_a_setting_can_be_given_on_the_command_line():
    assert (
        run_file.load(QUICKSTART, ["learner.learning_rate=0.5", "envs.copy-digits.replicas=3"])
        .envs["copy-digits"]
        .replicas
        == 3
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("batcher.tokens=[1", r"^--set batcher.tokens=\[1: not YAML: [^\n]*line 1, column"),
        ("kafka={a: 1, a: 2}", r"^--set kafka={a: 1, a: 2}: not YAML: [^\n]*already; keep one"),
        (
            "learner.kl.reference.by=server",
            "learner.kl.reference.by: Input should be 'learner' or 'pool'",
        ),
        (
            "learner.kl.reference.evry=1",
            "unknown key 'learner.kl.reference.evry'; valid keys: by, path",
        ),
        (
            "learner.learnin_rate=1",
            r"unknown key 'learner.learnin_rate'; did you mean 'learning_rate'\?",
        ),
        (
            "envs.copy-digits.fracton=1",
            r"unknown key 'envs.copy-digits.fracton'; did you mean 'fraction'\?",
        ),
        (
            "orchestrator.target.envv=x",
            r"unknown key 'orchestrator.target.envv'; did you mean 'env'\?",
        ),
        ("zzz=1", "valid keys: run, kafka"),
        ("envs.copy-digits=null", "envs.copy-digits: Input should be a valid dictionary"),
        ("learner.kl.reference=mine", "learner.kl.reference: Input should be a valid dictionary"),
        ("batcher.curriculum=stages", "batcher.curriculum: Input should be a valid dictionary"),
        ("batcher.curriculum={kind: [stages]}", "curriculum.kind: Input should be a valid string"),
        ("learner.clip_epsilon=high", "learner.clip_epsilon: Input should be a valid number"),
        ("run=Quick Start", "not a name"),
        ("learner", "write it as section.key=value"),
        ("learner.loss=grp", r"^[^:]*: learner.loss: 'grp' is not known; did you mean 'grpo'\?$"),
        (
            "learner.loss=reinforce",
            f"'reinforce' is not known; shipped: {', '.join(choices.LOSSES)};"
            " your own: MODULE:NAME",
        ),
        (
            "learner.kl.estimator=k33",
            r"learner.kl.estimator: 'k33' is not known; did you mean 'k3'\?",
        ),
        ("buffer.advantage=rlo", r"buffer.advantage: 'rlo' is not known; did you mean 'rloo'\?"),
        (
            "batcher.advantage=normalise",
            r"batcher.advantage: 'normalise' is not known; did you mean 'normalize'\?",
        ),
        (
            "batcher.advantage=x",
            (
                "batcher.advantage: 'x' is not known;"
                f" shipped: {', '.join(choices.BATCH_NORMALIZERS)}; your own: MODULE:NAME"
            ),
        ),
        (
            "learner.average=token",
            "learner.average: Input should be '', 'tokens', 'samples' or 'constant'",
        ),
        (
            "learner.correction.weight={by: token}",
            "unknown key 'learner.correction.weight'; did you mean 'weights'",
        ),
        (
            "inference.pools={evaluation: {replicas: -1}}",
            "inference.pools.evaluation.replicas: Input should be greater than or equal to 0",
        ),
        (
            "batcher.admission=capcity",
            r"batcher.admission: 'capcity' is not known; did you mean 'capacity'",
        ),
        (
            "eval.envs.copy-digits.sample=1",
            r"unknown key 'eval.envs.copy-digits.sample'; did you mean 'samples'\?",
        ),
        ("eval.evry=1", r"unknown key 'eval.evry'; did you mean 'every'\?"),
        (
            "eval.envs.copy-digits.top_p=0",
            "eval.envs.copy-digits.top_p: Input should be greater than 0",
        ),
        ("buffer.zero_advantage=drop", "buffer.zero_advantage: Input should be 'keep' or 'filter'"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [override])


def test_rules_of_the_buffer_by_env():
    run = run_file.load(QUICKSTART, ["envs.add-digits.buffer={group_size: 4, min_group_size: 2}"])
    assert run.buffer_of("add-digits") == run.buffer.model_copy(
        update={"group_size": 4, "min_group_size": 2}
    )
    assert run.buffer_of("copy-digits") == run.buffer


@pytest.mark.parametrize("setting", ["learner.loss", "buffer.advantage", "batcher.advantage"])
def test_ones_own_function_is_not_loaded_with_the_run_file(setting: str):
    section, name = setting.split(".")
    assert (
        getattr(getattr(run_file.load(QUICKSTART, [f"{setting}=nowhere:mine"]), section), name)
        == "nowhere:mine"
    )


def test_a_missing_file_and_broken_yaml_are_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        run_file.load("nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match=r"^[^\n]*not YAML[^\n]*$"):
        run_file.load(broken)
    broken.write_text("run: a\nenvs: {}\nrun: b")
    with pytest.raises(ConfigError, match=r"the key 'run' is in line 1 already[^\n]*line 3"):
        run_file.load(broken)
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match="a map of settings, not list"):
        run_file.load(broken)


TEN_LINES = """\
run: gsm8k
envs:
  gsm8k:
    kind: dataset
    params: {hub: openai/gsm8k, subset: main, template: gsm8k, reward: math-verify}
    max_tokens: 512
model: {path: Qwen/Qwen3-0.6B, max_seq_len: 1024}
learner: {preset: dr-grpo, lora: {}}
batcher: {total_token_budget: 65536}
orchestrator: {max_steps: 200}
"""


def test_ten_lines_are_enough_for_a_real_run(tmp_path: Path):
    path = tmp_path / "gsm8k.yaml"
    path.write_text(TEN_LINES)
    run = run_file.load(path)
    assert len(TEN_LINES.splitlines()) == 10
    parts = [part.name for part in topology.parts(run)]
    assert parts == ["learner", "inference-0", "buffer", "batcher", "env-gsm8k-0"]
    assert (run.learner.precision, run.inference.dtype) == ("bf16", "bfloat16")
    assert run.inference.max_model_len == run.model.max_seq_len
