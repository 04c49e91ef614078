from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

import streamrl
from streamrl.batcher.advantages import NORMALIZERS
from streamrl.buffer.advantages import ADVANTAGES
from streamrl.config import choices, run_file
from streamrl.errors import ConfigError

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
    "correction",
    [
        (
            "{old_policy: decoupled, weights: sequence, beyond: mask, reject: k1, reject_by:"
            " sequence, reject_above: 0.5}"
        ),
        "{old_policy: bypass, reject: geometric, reject_above: 1.5}",
    ],
)
def test_corrections_are_separate_choices(correction: str):
    chosen = run_file.load(QUICKSTART, [f"learner.correction={correction}"]).learner.correction
    assert chosen.model_dump(include=chosen.model_fields_set) == yaml.safe_load(correction)


def test_a_loss_without_a_ratio_takes_weights_of_the_policy_that_sampled():
    run = run_file.load(QUICKSTART, ["learner.loss=grpo", "learner.correction.weights=token"])
    assert (run.learner.correction.old_policy, run.learner.correction.weights) == (
        "bypass",
        "token",
    )


@pytest.mark.parametrize(
    ("override", "uses_reference", "uses_scorer_pool"),
    [
        ("learner.reference.by=none", False, False),
        ("learner.reference.by=learner", True, False),
        ("learner.kl_coefficient=0", False, False),
        ("learner.reference={by: pool, every: 20}", True, True),
    ],
)
def test_who_asks_the_reference(override: str, uses_reference: bool, uses_scorer_pool: bool):
    learner = run_file.load(QUICKSTART, [override]).learner
    assert (learner.uses_reference, learner.uses_scorer_pool) == (uses_reference, uses_scorer_pool)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "learner.reference={by: pool, path: m, every: 2}",
            "path m is a fixed reference, every 2 one that follows",
        ),
        ("learner.reference={by: none, every: 2}", "nobody would ask the reference"),
        (
            "learner={reference: {by: pool}, kl_coefficient: 0}",
            "nobody would read what the pool scores",
        ),
        (
            "learner.reference.by=server",
            "learner.reference.by: Input should be 'none', 'learner' or 'pool'",
        ),
        (
            "learner.reference.evry=1",
            r"unknown key 'learner.reference.evry'; did you mean 'every'\?",
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
        ("learner.clip_epsilon=high", "learner.clip_epsilon: Input should be a valid number"),
        ("batcher.lookahead=3", "need 0 <= lookahead <= max_age"),
        ("buffer.min_group_size=9", "larger than buffer.group_size 8"),
        ("envs.copy-digits.fraction=0.9", "add up to 1.2"),
        (
            "buffer.max_window_tokens=100",
            "100 does not hold a group of 8 rollouts of model.max_seq_len 64 tokens",
        ),
        (
            "buffer.min_group_size=1",
            (
                "rloo compares the rollouts of a group, so one alone has advantage 0 and only fills"
                " the batch; set it to 2"
            ),
        ),
        (
            "learner.loss=grpo",
            (
                "grpo has no ratio, and with buffer.max_age 2 it would train on old rollouts"
                " uncorrected; set buffer.max_age: 0, or"
            ),
        ),
        (
            "batcher={total_token_budget: 6, max_seq_len: 64}",
            "total_token_budget 6 holds no group of 4 rollouts",
        ),
        ("batcher.row_count=2", "less than total_token_budget"),
        ("model.max_seq_len=128", "could not be packed"),
        ("orchestrator.target.env=nope", "'nope' is not one of the envs: copy-digits, add-digits"),
        ("run=Quick Start", "not a name"),
        ("envs.copy-digits.top_p=0.9", "reproduces temperature only"),
        ("buffer.remember_versions=2", "remember_versions"),
        ("learner", "write it as section.key=value"),
        ("learner.loss=dapo", "dapo is ppo unless clip_epsilon_high is above clip_epsilon 0.2"),
        ("learner.loss=grp", r"^[^:]*: learner.loss: 'grp' is not known; did you mean 'grpo'\?$"),
        (
            "learner.loss=reinforce",
            f"'reinforce' is not known; shipped: {', '.join(choices.LOSSES)};"
            " your own: MODULE:NAME",
        ),
        ("learner.kl=k33", r"learner.kl: 'k33' is not known; did you mean 'k3'\?"),
        ("buffer.advantage=rlo", r"buffer.advantage: 'rlo' is not known; did you mean 'rloo'\?"),
        (
            "batcher.advantage=normalise",
            r"batcher.advantage: 'normalise' is not known; did you mean 'normalize'\?",
        ),
        (
            "batcher.advantage=x",
            (
                "batcher.advantage: 'x' is not known;"
                f" shipped: {', '.join(choices.BATCH_STAGES)}; your own: MODULE:NAME"
            ),
        ),
        (
            "learner.average=token",
            "learner.average: Input should be '', 'tokens', 'samples' or 'constant'",
        ),
        (
            "learner.correction.weight=token",
            "unknown key 'learner.correction.weight'; did you mean 'weights'",
        ),
        (
            "learner.correction.weights=token",
            "the ratio of ppo weighs by the policy that sampled already; set old_policy: decoupled",
        ),
        ("learner.correction.reject=k3", "reject is k3: set reject_above, the limit, above 0"),
        (
            "learner.correction={reject: geometric, reject_above: 1}",
            "set reject_above, the limit, above 1",
        ),
        ("learner.correction.weight_min=2", "weight_min 2.0 must be below weight_max 2.0"),
        (
            "envs.copy-digits.pool=generatin",
            (
                r"envs.copy-digits.pool: inference.pools has no 'generatin'; did you mean"
                r" 'generation'\?"
            ),
        ),
        (
            "inference.pools={generation: 2}",
            "the servers of pool generation are inference.replicas",
        ),
        ("inference.pools={Eval: 2}", "inference.pools.Eval: not a name"),
        (
            "inference.pools={evaluation: -1}",
            "inference.pools.evaluation: Input should be greater than or equal to 0",
        ),
        (
            "batcher={admission: capacity, eta: 3, total_token_budget: 2560, max_seq_len: 64}",
            "batcher.eta is 3 but buffer.max_age is 2",
        ),
        (
            "batcher.admission=capcity",
            r"batcher.admission: 'capcity' is not known; did you mean 'capacity'",
        ),
        (
            "batcher.eta=1",
            "batcher.admission is demand, which does not use it; set admission: capacity",
        ),
        (
            "eval.envs.copy-digits.sample=1",
            r"unknown key 'eval.envs.copy-digits.sample'; did you mean 'samples'\?",
        ),
        ("eval.evry=1", r"unknown key 'eval.evry'; did you mean 'every'\?"),
        (
            "eval.envs.held={}",
            (
                "eval.envs.held: 'held' is not one of the envs: copy-digits, add-digits; say which"
                " with `env`"
            ),
        ),
        (
            "eval.envs.copy-digits={samples: 4, k: [1, 8]}",
            "k is \\[1, 8\\], each at most samples, 4",
        ),
        (
            "eval.envs.copy-digits.top_p=0",
            "eval.envs.copy-digits.top_p: Input should be greater than 0",
        ),
        ("buffer.zero_advantage=drop", "buffer.zero_advantage: Input should be 'keep' or 'filter'"),
    ],
)
def test_what_cannot_work_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [override])


def test_a_group_that_could_fit_the_budget_and_not_the_rows_is_named():
    """Twelve answers of 1,025 tokens are 12,300: within the budget, and no two of them fit into one
    of the ten rows of 2,048.
    """
    changes = [
        "batcher={}",
        "model.max_seq_len=2048",
        "inference.max_model_len=2048",
        "buffer={group_size: 12}",
    ]
    with pytest.raises(
        ConfigError,
        match=(
            "12 rollouts of 1025 tokens need a row of 2048 each, and there are 10: .*; set it to 12"
        ),
    ):
        run_file.load(QUICKSTART, changes)
    assert run_file.load(QUICKSTART, [*changes, "batcher.row_count=12"]).batcher.rows == 12


def test_rules_of_the_buffer_by_env():
    run = run_file.load(QUICKSTART, ["envs.add-digits.buffer={group_size: 4, min_group_size: 2}"])
    assert run.buffer_of("add-digits") == run.buffer.model_copy(
        update={"group_size": 4, "min_group_size": 2}
    )
    assert run.buffer_of("copy-digits") == run.buffer


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            "{group_size: 3}",
            (
                "envs.add-digits.buffer.min_group_size 4 is larger than"
                " envs.add-digits.buffer.group_size 3"
            ),
        ),
        ("{max_age: 0}", "batcher.lookahead is 1 but envs.add-digits.buffer.max_age is 0"),
        ("{advantage: reinforce++}", "of the envs' advantages some need normalize and some none"),
        (
            "{groups_size: 3}",
            "unknown key 'envs.add-digits.buffer.groups_size'; did you mean 'group_size'",
        ),
    ],
)
def test_rules_of_an_env_that_cannot_work_are_named(own: str, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_file.load(QUICKSTART, [f"envs.add-digits.buffer={own}"])


@pytest.mark.parametrize("setting", ["min_group_size=1", "max_window_tokens=9"])
def test_a_run_that_is_there_is_read_although_it_would_be_refused_today(setting: str):
    data = run_file.load(QUICKSTART).model_dump(mode="json")
    name, _, value = setting.partition("=")
    data["buffer"][name] = int(value)
    assert getattr(run_file.recorded(data, "here").buffer, name) == int(value)
    with pytest.raises(ConfigError):
        run_file.parse(data)


@pytest.mark.parametrize(
    "setting", ["learner.loss", "learner.kl", "buffer.advantage", "batcher.advantage"]
)
def test_ones_own_function_is_not_loaded_with_the_run_file(setting: str):
    section, name = setting.split(".")
    assert (
        getattr(getattr(run_file.load(QUICKSTART, [f"{setting}=nowhere:mine"]), section), name)
        == "nowhere:mine"
    )


def test_the_names_of_a_run_file_are_those_of_the_functions():
    """In the same order, which is that of the error that lists them."""
    # as text: no JAX here
    source = (Path(streamrl.__file__).parent / "learner" / "losses.py").read_text()
    assert [*choices.ADVANTAGES] == [*ADVANTAGES], "choices.py and buffer/advantages.py differ"
    assert [*choices.BATCH_STAGES] == [*NORMALIZERS], "choices.py and batcher/advantages.py differ"
    for name in ("LOSSES", "DIVERGENCES"):
        named = [*getattr(choices, name)]
        assert named == keys_of(source, name), f"{name}: choices.py and learner/losses.py differ"


def keys_of(source: str, name: str) -> list[str]:
    """Keys of the dict that a module's source binds to a name."""
    (made,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    )
    assert isinstance(made, ast.Dict)
    return [ast.literal_eval(key) for key in made.keys if key is not None]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["batcher.processes=34"],
            (
                "2560 does not give every process a rollout for certain: 34 processes and groups of"
                " 8 .* of 64 tokens need 2624"
            ),
        ),
        (
            ["batcher.processes=4", "batcher.row_count=45"],
            "batcher.row_count 45 cannot be divided among batcher.processes 4",
        ),
        (
            ["batcher.balance=flops", "model.path=elsewhere"],
            "batcher.balance flops needs model.hidden: hidden_size in elsewhere/config.json",
        ),
    ],
)
def test_a_division_that_cannot_work_is_named(overrides: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, overrides)


def test_rows_are_a_multiple_of_the_processes():
    """2560 tokens and a tenth more in rows of 64 are 44, and one; a model somewhere else says its
    hidden size itself.
    """
    assert [
        run_file.load(QUICKSTART, [f"batcher.processes={n}"]).batcher.rows for n in (1, 2, 33)
    ] == [45, 46, 66]
    assert run_file.load(QUICKSTART).model.hidden_size == 128
    assert (
        run_file.load(
            QUICKSTART, ["model.path=elsewhere", "model.hidden=4096", "batcher.balance=flops"]
        ).model.hidden_size
        == 4096
    )


def test_a_missing_file_and_broken_yaml_are_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        run_file.load("nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match=r"^[^\n]*not YAML[^\n]*$"):
        run_file.load(broken)
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match="a map of settings, not list"):
        run_file.load(broken)


def test_a_setting_that_is_gone_is_refused_unless_it_says_what_applies():
    text = QUICKSTART.read_text()
    data = {**yaml.safe_load(text), "inference": {"stick_margin": 3}}
    with pytest.raises(
        ConfigError, match=r"^r.yaml: the setting inference.stick_margin is gone, 8 always applies"
    ):
        run_file.parse(data, "r.yaml")
    assert run_file.recorded(data, "r.yaml").inference.replicas == 1
    assert run_file.parse({**data, "inference": {"stick_margin": 8}}, "r.yaml").inference.port == 0


@pytest.mark.parametrize(("budget", "length", "rows"), [(2560, 64, 45), (16_384, 2048, 10)])
def test_rows_hold_the_budget_and_a_tenth_more(budget: int, length: int, rows: int):
    assert run_file.Batcher(total_token_budget=budget, max_seq_len=length).rows == rows
