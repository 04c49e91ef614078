"""Which settings of another user's run file are taken. It comes with an export, and a user who
reads, imports or continues the run does not know what its author has put there.

Names, sizes, weights, losses and limits are kept. Whatever reaches out of the run is left out: the
cluster, directories, addresses, programs, code, variables, secrets, other runs and the machine's
devices. A setting that is in neither list is left out, and a test holds the lists complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from streamrl.config.plugins import is_import
from streamrl.config.sections.envs import AgentEnv, ServerEnv
from streamrl.envs.catalog import ENVS


def paths(text: str) -> frozenset[str]:
    """Settings by their paths in a run file, where `*` is a name that the run file chooses."""
    return frozenset(text.split())


KEPT = paths(
    """
    run
    envs.*.kind envs.*.params envs.*.fraction envs.*.replicas envs.*.host envs.*.seed envs.*.pool
    envs.*.temperature envs.*.max_tokens envs.*.chat_template_kwargs
    envs.*.max_groups_in_flight envs.*.max_groups_per_s envs.*.max_turns
    envs.*.rollout_timeout_s envs.*.env_timeout_s envs.*.pass_rate.between
    envs.*.pass_rate.visits envs.*.pass_rate.rest_epochs envs.*.pass_rate.reward
    envs.*.pass_rate.at_least envs.*.rewards envs.*.reward_weights
    envs.*.timeout_s envs.*.attempts envs.*.buffer.group_size envs.*.buffer.min_group_size
    envs.*.buffer.max_age envs.*.buffer.advantage envs.*.buffer.zero_advantage
    envs.*.buffer.group_wait_s envs.*.loss.policy_gradient
    envs.*.loss.cross_entropy envs.*.loss.teacher_kl envs.*.sessions.rewards
    envs.*.sessions.reward_ranges envs.*.sessions.idle_s envs.*.sessions.reward_wait_s
    envs.*.sessions.max_open envs.*.sessions.tool_syntax
    buffer.group_size buffer.min_group_size buffer.max_age buffer.shards
    buffer.max_window_tokens buffer.max_invalid_frac buffer.advantage buffer.zero_advantage
    buffer.group_wait_s
    batcher.total_token_budget batcher.max_seq_len batcher.row_lengths batcher.row_count
    batcher.processes batcher.balance batcher.lookahead batcher.admission
    batcher.on_shortage batcher.advantage batcher.curriculum.kind batcher.curriculum.stages
    batcher.curriculum.batches batcher.curriculum.least
    model.tiny.layers model.tiny.hidden model.tiny.head_dim model.tiny.alphabet model.tiny.chat
    model.tiny.seed model.max_seq_len model.history model.hidden
    learner.name learner.preset learner.loss learner.average learner.clip_epsilon
    learner.clip_epsilon_high learner.clip_ratio_max learner.correction.old_policy
    learner.correction.weights.by learner.correction.weights.limits
    learner.correction.weights.beyond learner.correction.reject.distance
    learner.correction.reject.by learner.correction.reject.above
    learner.kl.coefficient learner.kl.estimator learner.kl.applied_to learner.kl.reference.by
    learner.kl.reference.every learner.lora.rank learner.lora.alpha
    learner.lora.targets learner.micro_batch_rows learner.mesh.data learner.mesh.replica
    learner.mesh.model learner.mesh.context learner.mesh.expert learner.mesh.nodes
    learner.processes learner.precision learner.remat learner.attention learner.deterministic
    learner.logprob_chunk learner.optimizer learner.learning_rate learner.warmup_steps
    learner.schedule.kind learner.schedule.steps learner.schedule.min_ratio learner.beta1
    learner.beta2 learner.weight_decay learner.max_grad_norm learner.normalize_advantages
    learner.checkpoint_every learner.keep_checkpoints
    learner.on_divergence learner.probe_tokens
    scorer.replicas
    weights.keep_versions
    inference.replicas inference.pools inference.dtype inference.tensor_parallel
    inference.max_model_len inference.max_num_seqs
    inference.heartbeat_s inference.probe_tolerance
    gateway.replicas
    eval.envs eval.every
    orchestrator.target.env orchestrator.target.reward orchestrator.target.batches
    orchestrator.max_steps orchestrator.max_wall_s
    topics.partitions topics.replicas topics.retention_hours topics.on_removed
    fork.run fork.version fork.sha256 fork.balance fork.stage fork.rewards fork.scorers
    """
)
LEFT_OUT = paths(
    """
    kafka
    runs_dir
    imports
    envs.*.python envs.*.variables envs.*.api_key envs.*.sessions.untrained
    model.path
    learner.kl.reference.path learner.teacher
    learner.checkpoint_copies
    weights.store
    inference.python inference.host inference.port inference.api_key inference.engine
    inference.also_serves inference.served_by inference.extra_args
    gateway.host gateway.port gateway.url gateway.signing_secret gateway.revoked_before
    orchestrator.sinks
    metrics.serve
    topics.config
    placement
    """
)
SECTIONS = frozenset(path.rpartition(".")[0] for path in (*KEPT, *LEFT_OUT)) | {
    "envs.*",
    "learner",
    "orchestrator",
}
TEXTS = frozenset({"model.tiny.alphabet"})  # characters, and nothing that is opened
# A name that is no path, address, reference to a variable or option.
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,199}|")
REWARDS = ("math-verify",)  # of the shipped ones: a judge sends what it reads to an address


def harmless_settings(run_file: dict[str, Any], trusted: frozenset[str]) -> dict[str, Any]:
    """The settings of another user's run file that are taken. MODULE:NAME is taken where it is
    `trusted`.
    """
    settings = dict(_kept("", run_file, trusted))
    for name, env in settings.get("envs", {}).items():
        if run_file["envs"][name].get("python"):
            for own in ServerEnv.model_fields.keys() - AgentEnv.model_fields.keys():
                env.pop(own, None)  # Without its Python, the env is one of agents.
    learner = settings.get("learner")
    given = run_file.get("learner")
    if learner and isinstance(given, dict) and given.get("loss") != learner.get("loss"):
        learner.pop("correction", None)  # It belongs to the loss, which is left out.
    return settings


def _kept(
    section: str, settings: dict[str, Any], trusted: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    """What is taken of a section, by name."""
    for name, value in settings.items():
        path = f"{section}.*" if section == "envs" else f"{section}.{name}".removeprefix(".")
        if path in SECTIONS or path == "envs":
            if isinstance(value, dict):
                yield name, dict(_kept(path, value, trusted))
            elif value is None:
                yield name, None
        elif path in KEPT and _is_taken(path, value, trusted):
            yield name, _without_harm(path, value, trusted)


def _is_taken(path: str, value: Any, trusted: frozenset[str]) -> bool:
    if path == "envs.*.kind":
        return value in ENVS or value in trusted
    if isinstance(value, str):
        return path in TEXTS or _is_word(value, trusted)
    return True


def _without_harm(path: str, value: Any, trusted: frozenset[str]) -> Any:
    """The value of a setting, without what could reach out of the run."""
    if path == "envs.*.params":
        return _numbers(value)
    if path == "envs.*.rewards" and isinstance(value, dict):
        return {
            name: {"kind": reward["kind"], "params": _numbers(reward.get("params"))}
            for name, reward in value.items()
            if isinstance(reward, dict)
            and (reward.get("kind") in REWARDS or reward.get("kind") in trusted)
        }
    if path == "inference.pools" and isinstance(value, dict):
        return {
            name: {"replicas": own.get("replicas", 1)}
            for name, own in value.items()
            if _is_word(name, trusted) and isinstance(own, dict)
        }
    if path == "eval.envs" and isinstance(value, dict):
        return {
            name: {**_harmless(own, trusted), "params": _numbers(own.get("params"))}
            for name, own in value.items()
            if isinstance(own, dict)
        }
    return _harmless(value, trusted)


def _harmless(value: Any, trusted: frozenset[str]) -> Any:
    """The value, without texts in it that are no names."""

    def is_taken(inner: Any) -> bool:
        return not isinstance(inner, str) or _is_word(inner, trusted)

    if isinstance(value, dict):
        return {
            name: _harmless(inner, trusted)
            for name, inner in value.items()
            if is_taken(name) and is_taken(inner)
        }
    if isinstance(value, list):
        return [_harmless(inner, trusted) for inner in value if is_taken(inner)]
    return value


def _is_word(text: str, trusted: frozenset[str]) -> bool:
    return text in trusted if is_import(text) else bool(WORD.fullmatch(text))


def _numbers(params: Any) -> dict[str, Any]:
    """The arguments of an env or a reward that are numbers. Texts may be paths and addresses, and
    true may allow what this machine does not.
    """
    if not isinstance(params, dict):
        return {}
    return {
        name: value
        for name, value in params.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
