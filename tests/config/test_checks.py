from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.config.checks import is_loopback
from streamrl.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "deploy" / "runs" / "quickstart.yaml"


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
            "learner={lora: {rank: 8}, reference: {every: 2}}",
            "learner.reference.every is 2, and with learner.lora the reference is the base",
        ),
        ("learner.lora={targets: [lm_head]}", "Input should be 'q_proj', 'k_proj'"),
        (
            "batcher.max_seq_len=1536",
            "in blocks of 1024 tokens; give a multiple of it, such as 2048",
        ),
        (
            "learner.attention=pallas",
            "max_seq_len 64: attention by pallas is computed in blocks of 128",
        ),
        (
            "learner={attention: cudnn, mesh: {context: 2}}",
            "learner.attention cudnn needs whole rows, and learner.mesh.context divides them",
        ),
        ("batcher.row_lengths=[32, 64]", "row_lengths: 64 is not below max_seq_len 64"),
        ("batcher.row_lengths=[32, 32]", "32]: each length once"),
        (
            "batcher={max_seq_len: 4096, row_lengths: [1536]}",
            "row_lengths: 1536: attention by auto is computed in blocks of 1024",
        ),
        ("learner.schedule=cosine", "learner.schedule: cosine needs a number of steps"),
        ("learner.warmup_fraction=0.1", "learner.warmup_fraction needs a number of steps"),
        ("learner={schedule: linear, schedule_steps: 10}", "10 leaves nothing after the 10 steps"),
        ("learner.min_learning_rate=1", "min_learning_rate 1 is above learning_rate 0.001"),
        (
            "envs.copy-digits.loss={policy_gradient: 0}",
            "every weight is 0, so its rollouts would train nothing",
        ),
        (
            "envs.copy-digits.loss={teacher_kl: 1}",
            "learner.teacher.path names no teacher",
        ),
        ("envs.copy-digits.loss={cross_entropy: -1}", "greater than or equal to 0"),
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
        ("envs.copy-digits.top_p=0.9", "reproduces temperature only"),
        ("buffer.remember_versions=2", "remember_versions"),
        ("learner.loss=dapo", "dapo is ppo unless clip_epsilon_high is above clip_epsilon 0.2"),
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
            "batcher={admission: capacity, eta: 3, total_token_budget: 2560, max_seq_len: 64}",
            "batcher.eta is 3 but buffer.max_age is 2",
        ),
        (
            "batcher.eta=1",
            "batcher.admission is demand, which does not use it; set admission: capacity",
        ),
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
            "envs.copy-digits.chat_template_kwargs={tools: []}",
            "chat_template_kwargs: 'tools' is given by streamrl and vLLM; leave it out",
        ),
        (
            "inference.engine={trust_remote_code: true}",
            "inference.engine.trust_remote_code: not a setting that a run file passes on",
        ),
        (
            "inference.engine={gpu_memory_utilisation: 0.8}",
            "did you mean 'gpu_memory_utilization'?",
        ),
        (
            "inference.engine={attention_backend: /tmp/mine.py}",
            "inference.engine.attention_backend: '/tmp/mine.py' is not a name",
        ),
        (
            "inference.engine={block_size: large}",
            "inference.engine.block_size: 'large' is not a number",
        ),
        (
            "inference.engine={enforce_eager: 1}",
            "inference.engine.enforce_eager: 1 is neither true nor false",
        ),
        (
            "inference.engines={judges: {model: /models/judge}}",
            "inference.engines.judges: inference.pools has no 'judges'",
        ),
        (
            "inference.engines={generation: {model: /models/judge}}",
            "envs.copy-digits.pool: generation serves a model of its own",
        ),
        (
            "inference.engines={generation: {quantization: mine.Method}}",
            "quantization: 'mine.Method' is not a name",
        ),
        (
            "envs.copy-digits.tool_syntax=hermes",
            "tool_syntax is for envs of kind verifiers:... and for sessions",
        ),
        (
            "envs.copy-digits={sessions: {}, replicas: 1}",
            "agents make its rollouts .*; set replicas: 0",
        ),
        (
            "envs.copy-digits.pass_rate={low: 0.9, high: 0.1}",
            "pass_rate: low 0.9 is above high 0.1",
        ),
        (
            "inference.host=0.0.0.0",
            "inference.host 0.0.0.0 can be reached from other machines: set inference.api_key",
        ),
        (
            "gateway.host=0.0.0.0",
            "gateway.host 0.0.0.0 can be reached from other machines: set gateway.api_key",
        ),
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


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.7", False),
        ("inference", False),
        ("env:HOST", False),
    ],
)
def test_an_address_that_only_this_machine_reaches(host: str, only_here: bool):
    assert is_loopback(host) == only_here


def test_demonstrations_need_no_peers():
    """Without a policy gradient nobody reads their advantages."""
    alone = {"group_size": 1, "min_group_size": 1}
    imitated = {"policy_gradient": 0, "cross_entropy": 1}
    data = {"run": "r", "envs": {"copy-digits": {}, "shown": {"replicas": 0, "buffer": alone}}}
    with pytest.raises(ConfigError, match=r"envs\.shown\.buffer\.min_group_size is 1"):
        run_file.parse(data)
    data["envs"]["shown"]["loss"] = imitated
    assert run_file.parse(data).envs["shown"].loss.cross_entropy == 1
