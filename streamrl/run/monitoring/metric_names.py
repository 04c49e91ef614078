"""Lists all metrics with their names, units and meanings. The topic `metrics`, Prometheus, the
sinks and the page docs/metrics.md of the site use this one list.

A piece of a name in braces is a name of the run, such as an env, a topic or a server. In
Prometheus it is a label. `replays/` and `batches/` are those of docs/design/overview.md. `python -m
streamrl.run.monitoring.metric_names` prints it as a table.
"""

from __future__ import annotations

import re
from functools import cache

from streamrl.config import topology
from streamrl.config.extensions import extensions
from streamrl.config.metric_spec import MetricSpec

OF_EVERY_PART = ("part", "worker")  # the first pieces of metrics that every part has
# The sources that a run has once. The lead learner is another one, whose name the run chooses.
SINGLE = tuple(role.name for role in topology.roles())


CORE = (
    # ---- every part: measured by its log (stream/log/instrumented.py)
    MetricSpec(
        "part/ready",
        "1",
        "1 once state is restored (a server: weights loaded and probed)",
    ),
    MetricSpec("part/since_activity_s", "s", "time since the part's loop last ran"),
    MetricSpec(
        "part/lag_records/{topic}",
        "records",
        "unread records of an input, with transaction markers",
    ),
    MetricSpec("part/read_records/{topic}", "records", "records read from an input", "counter"),
    MetricSpec(
        "part/written_records/{topic}", "records", "records committed to an output", "counter"
    ),
    MetricSpec(
        "part/dead_letters/{topic}",
        "records",
        "records of an input that could not be used",
        "counter",
    ),
    MetricSpec("part/transactions", "transactions", "transactions committed", "counter"),
    MetricSpec("part/transactions_s", "s", "time of all transactions together", "counter"),
    MetricSpec("part/transaction_s", "s", "time of the last transaction"),
    MetricSpec("part/transaction_max_s", "s", "longest transaction in the last minute"),
    MetricSpec(
        "part/since_transaction_s",
        "s",
        "time since the last transaction",
    ),
    # ---- buffer and batcher: the loop (stream/processor/processor.py)
    MetricSpec("worker/events_per_s", "records/s", "records processed"),
    MetricSpec("worker/process_latency_s", "s", "time to process one batch of records, mean"),
    MetricSpec("worker/busy_frac", "1", "share of time spent processing"),
    MetricSpec("worker/invalid_frac/{topic}", "1", "share of invalid records among the last 1,000"),
    MetricSpec("worker/paused_s/{topic}", "s", "pause of a topic with mostly invalid records"),
    # ---- buffer
    MetricSpec("buffer/version", "version", "newest policy version known to the buffer"),
    MetricSpec("buffer/window_tokens/{environment}", "tokens", "tokens in open groups"),
    MetricSpec(
        "replays/{environment}/rollouts_in_buffer",
        "rollouts",
        "rollouts in closed groups that wait when a batch is made",
    ),
    MetricSpec(
        "replays/{environment}/tokens_in_buffer",
        "tokens",
        "their tokens",
    ),
    MetricSpec(
        "replays/{environment}/frac_on_policy",
        "1",
        "share of the held rollouts from the newest version",
    ),
    MetricSpec(
        "replays/{environment}/frac_used_in_batch",
        "1",
        "share of the held rollouts that the batch took",
    ),
    MetricSpec(
        "replays/{environment}/new_rollouts",
        "rollouts",
        "rollouts that arrived between two versions",
    ),
    MetricSpec("replays/{environment}/new_tokens", "tokens", "their tokens, with prompts"),
    MetricSpec("replays/{environment}/new_generated_tokens", "tokens", "their sampled tokens"),
    MetricSpec("replays/{environment}/new_failed", "rollouts", "new rollouts that failed"),
    MetricSpec(
        "replays/{environment}/new_misaligned",
        "rollouts",
        "new rollouts with tokens that the policy has not seen",
    ),
    MetricSpec(
        "replays/{environment}/suspicious_logprobs",
        "rollouts",
        "new rollouts of 8 tokens or more, all of logprob 0",
    ),
    MetricSpec(
        "replays/{environment}/zero_advantage_groups", "groups", "groups whose advantages are all 0"
    ),
    MetricSpec(
        "replays/{environment}/frac_truncated", "1", "share of the new rollouts that a limit ended"
    ),
    MetricSpec("replays/{environment}/reward/mean", "reward", "mean reward of the new rollouts"),
    MetricSpec("replays/{environment}/reward/std", "reward", "its standard deviation"),
    MetricSpec(
        "replays/{environment}/rewards/{reward}/mean",
        "reward",
        "mean of one named reward of the new rollouts",
    ),
    MetricSpec("replays/{environment}/rewards/{reward}/std", "reward", "its standard deviation"),
    # ---- batcher
    MetricSpec("batcher/version", "version", "newest policy version known to the batcher"),
    MetricSpec("batcher/next_batch", "batch", "number of the batch that is being filled"),
    MetricSpec("batcher/blocked_s", "s", "time that the next batch has waited for tokens"),
    MetricSpec("batcher/waited_for_data_s", "s", "time that a batch waited with no share complete"),
    MetricSpec(
        "batcher/waited_for_share_s/{environment}",
        "s",
        "time that a batch waited for this share alone; `rest`: see missing_tokens",
    ),
    MetricSpec(
        "batcher/missing_tokens/{environment}",
        "tokens",
        "tokens that the next batch lacks; `rest`: what the fractions leave to all envs",
    ),
    MetricSpec("batcher/held_tokens/{environment}", "tokens", "tokens of groups ready for a batch"),
    MetricSpec("batcher/tokens_total", "tokens", "tokens of a batch"),
    MetricSpec(
        "batcher/row_length_tokens",
        "tokens",
        "tokens of a row, with batcher.row_lengths",
    ),
    MetricSpec("batcher/rows_filled_frac", "1", "share of a batch's positions with a token"),
    MetricSpec("batcher/padding_frac", "1", "share of a batch's positions without a token"),
    MetricSpec(
        "batcher/imbalance_frac",
        "1",
        "1 - mean / max of the costs per process: the share of a step that waits for the slowest",
    ),
    MetricSpec("batcher/token_imbalance_frac", "1", "the same in tokens"),
    MetricSpec(
        "batcher/process_rollouts_min", "rollouts", "sequences of the process with the fewest"
    ),
    MetricSpec(
        "batcher/batch_age_mean",
        "versions",
        "mean age (staleness) of a batch's rollouts",
    ),
    MetricSpec("batcher/batch_age_max", "versions", "age of the oldest rollout of a batch"),
    MetricSpec(
        "batcher/mixed_versions_frac",
        "1",
        "share of rollouts that several versions sampled",
    ),
    MetricSpec("batcher/curriculum_stage", "stage", "stage of the batch, from 0"),
    MetricSpec("batches/{environment}/rollouts_used", "rollouts", "rollouts in a batch"),
    MetricSpec("batches/{environment}/tokens_used", "tokens", "tokens in a batch"),
    MetricSpec("batches/{environment}/frac_used", "1", "share of a batch's tokens"),
    MetricSpec("batches/{environment}/frac_wanted", "1", "share that the curriculum wanted"),
    MetricSpec(
        "batches/{environment}/reward/mean", "reward", "mean reward of the rollouts in a batch"
    ),
    MetricSpec(
        "batches/{environment}/mixed_versions_frac",
        "1",
        "share of the env's rollouts that several versions sampled",
    ),
    MetricSpec(
        "batches/{environment}/age/mean",
        "versions",
        "mean age of the env's rollouts in a batch",
    ),
    # ---- learner
    MetricSpec("learner/loss", "1", "loss that is minimised"),
    MetricSpec("learner/policy_loss", "1", "loss without the divergence"),
    MetricSpec(
        "learner/cross_entropy", "nats", "-logprob of the tokens that the cross entropy trains"
    ),
    MetricSpec("learner/teacher_kl", "nats", "divergence from the teacher per token, by k2"),
    MetricSpec(
        "learner/kl", "nats", "divergence from the reference per token, by learner.kl.estimator"
    ),
    MetricSpec("learner/grad_norm", "1", "norm of the gradient before clipping"),
    MetricSpec("learner/learning_rate", "1", "learning rate of the step"),
    MetricSpec("learner/entropy", "nats", "entropy of the policy per token"),
    MetricSpec(
        "learner/ratio_mean", "1", "probability of a token over that when it was sampled, mean"
    ),
    MetricSpec("learner/ratio_max", "1", "the largest such ratio"),
    MetricSpec("learner/clip_fraction", "1", "share of tokens whose ratio is clipped"),
    MetricSpec(
        "learner/mismatch_kl",
        "nats",
        "divergence of the sampling policy from the learner's per token, k3",
    ),
    MetricSpec("learner/rejected_frac", "1", "share of tokens that learner.correction rejects"),
    MetricSpec(
        "learner/effective_sample_size", "1", "of the importance weights, as a share of the samples"
    ),
    MetricSpec(
        "learner/weight_mean", "1", "mean importance weight in use, a factor of the gradient"
    ),
    MetricSpec(
        "learner/untruncated_weight_mean",
        "1",
        "mean importance weight before truncation and rejection",
    ),
    MetricSpec(
        "learner/masked_sequences",
        "sequences",
        "sequences with an unknown token id or a temperature out of range",
    ),
    MetricSpec(
        "learner/skipped", "1", "1 if the step was skipped because loss or gradient was not finite"
    ),
    MetricSpec("learner/step_s", "s", "time of a training step"),
    MetricSpec("learner/idle_s", "s", "time that the learner waited for the batch"),
    MetricSpec(
        "learner/publish_s",
        "s",
        "time that training was paused for the version",
    ),
    MetricSpec("learner/publish_wait_s", "s", "of that, the wait for the version before"),
    MetricSpec("learner/export_s", "s", "time to copy the weights and write them"),
    MetricSpec("learner/hash_s", "s", "time to hash the weights"),
    MetricSpec("learner/probe_s", "s", "time to compute the probe"),
    MetricSpec("learner/announce_s", "s", "time to announce the version"),
    MetricSpec("learner/checkpoint_s", "s", "time to copy a checkpoint, where one was due"),
    MetricSpec("learner/tokens_per_s", "tokens/s", "tokens trained on within a step"),
    MetricSpec(
        "learner/batch_age_mean", "versions", "batcher/batch_age_mean of the batch trained on"
    ),
    MetricSpec(
        "learner/batch_age_max", "versions", "batcher/batch_age_max of the batch trained on"
    ),
    # ---- envs
    MetricSpec("env/groups_in_flight", "groups", "groups that are being sampled"),
    MetricSpec("env/groups_outstanding", "groups", "groups launched and not closed yet"),
    MetricSpec("env/groups_capacity", "groups", "groups that may be outstanding now"),
    MetricSpec("env/rollouts_per_s", "rollouts/s", "rollouts published"),
    MetricSpec("env/failed", "rollouts", "rollouts published as failed since the last report"),
    MetricSpec("env/waiting_for_demand_s", "s", "time without a record of demand"),
    MetricSpec("env/left_out", "problems", "problems skipped for their pass rate"),
    MetricSpec(
        "env/truncated/{limit}", "rollouts", "rollouts ended by that limit since the last report"
    ),
    MetricSpec("env/forks", "turns", "turns that began another sequence since the last report"),
    MetricSpec(
        "env/reward_mean", "reward", "mean reward of the rollouts published since the last report"
    ),
    MetricSpec("env/request_s", "s", "time of a request to a server, mean"),
    MetricSpec(
        "env/generation_s_kept",
        "s",
        "time of sampling the answers that this process found recorded",
    ),
    MetricSpec(
        "env/generation_s_lost",
        "s",
        "time of sampling what was sampled again instead, or not asked for again",
    ),
    MetricSpec(
        "inference_context/rollouts",
        "rollouts",
        "rollouts made with an inference context",
        "counter",
    ),
    MetricSpec(
        "inference_context/misaligned",
        "rollouts",
        "rollouts whose tokens are not the server's",
        "counter",
    ),
    MetricSpec("inference_context/short", "rollouts", "rollouts of very few tokens", "counter"),
    MetricSpec(
        "inference_context/unchecked",
        "rollouts",
        "rollouts not compared, as their prompt ids were not sent",
        "counter",
    ),
    MetricSpec(
        "inference_context/suspicious",
        "rollouts",
        "rollouts with logprobs that are all 0, above 0 or implausibly low",
        "counter",
    ),
    MetricSpec(
        "inference_context/template_failures",
        "prompts",
        "prompts that the chat template refused",
        "counter",
    ),
    # ---- inference
    MetricSpec("inference/in_flight", "sequences", "sequences running or waiting in vLLM"),
    MetricSpec(
        "inference/generated_tokens", "tokens", "tokens generated since vLLM started", "counter"
    ),
    MetricSpec(
        "inference/requests/{caller}",
        "requests",
        "requests to sample that carried the key of that run",
        "counter",
    ),
    MetricSpec("inference/answers/{caller}", "answers", "answers that these asked for", "counter"),
    MetricSpec("inference/asked_s", "s", "time with a request in vLLM", "counter"),
    MetricSpec("inference/paused_s", "s", "time paused for new weights", "counter"),
    MetricSpec("inference/idle_s", "s", "time without a request", "counter"),
    MetricSpec(
        "inference/heard_s",
        "s",
        "time from a version's announcement to its copy here, by both clocks",
    ),
    MetricSpec(
        "inference/pull_s",
        "s",
        "time to copy and check a version's weights, and before the first adapter its base",
    ),
    MetricSpec("inference/start_s", "s", "time to start vLLM"),
    MetricSpec("inference/swap_s", "s", "time from pause to resume with new weights"),
    MetricSpec("inference/pause_s", "s", "of that, until vLLM was paused"),
    MetricSpec("inference/reload_s", "s", "of that, to load the weights"),
    MetricSpec("inference/resume_s", "s", "of that, to resume the requests"),
    MetricSpec(
        "inference/mismatch_max_abs",
        "nats",
        "largest difference of a logprob from the learner's in the last probe",
    ),
    MetricSpec(
        "inference/mismatch_mean_abs",
        "nats",
        "mean difference in the last probe",
    ),
    MetricSpec("inference/mismatch_tokens", "tokens", "tokens compared in the last probe"),
    # ---- orchestrator: the run as a whole
    MetricSpec(
        "orchestrator/active_s", "s", "time that the run has had a server, in all its sessions"
    ),
    MetricSpec(
        "orchestrator/learner_s/{cause}",
        "s",
        "time of the learner that went to `training`, `publishing` (it stood still while a version"
        " was copied), or to waiting for the version before (`version`), for servers that loaded"
        " `weights`, for the `share` of one env, for `data`, for the `log`; or to `other`",
        "counter",
    ),
    MetricSpec(
        "orchestrator/server_s/{server}/{cause}",
        "s",
        "time of a server that went to `sampling`, to loading `weights`, or without a request: the"
        " `share` of one env was missing, or enough was under way (`demand`)",
        "counter",
    ),
    MetricSpec("orchestrator/running/{process}", "1", "1 while the process runs"),
    MetricSpec(
        "orchestrator/restarts/{process}", "restarts", "restarts by this orchestrator", "counter"
    ),
    MetricSpec("orchestrator/version", "version", "newest policy version announced"),
    MetricSpec("orchestrator/since_version_s", "s", "time since that announcement"),
    MetricSpec("orchestrator/batch", "batch", "number of the newest batch"),
    MetricSpec(
        "orchestrator/fates/{environment}/{fate}",
        "rollouts",
        "rollouts with that fate since the run began",
        "counter",
    ),
    MetricSpec("orchestrator/server_ready/{server}", "1", "1 while the server is ready"),
    MetricSpec(
        "orchestrator/server_behind/{server}",
        "versions",
        "versions between the server and the newest",
    ),
    MetricSpec(
        "orchestrator/server_silent_s/{server}", "s", "time since the server's last heartbeat"
    ),
)

METRICS = (*CORE, *(spec for extension in extensions().values() for spec in extension.metrics))


@cache
def find_metric(name: str) -> tuple[MetricSpec, tuple[str, ...]] | None:
    """The metric to which a published name belongs, and the values of its labels.

    None for a name that is not in the list.
    """
    for spec, pattern in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is not None:
            return spec, match.groups()
    return None


def series_name(source: str, name: str, lead: str) -> str:
    """The name of a curve among all curves of a run.

    It is the metric's name, followed by the source if several sources publish that metric. `lead`
    is the source of the lead learner, whose `learner/` metrics are the run's.
    """
    first = name.split("/", 1)[0]
    has_several_sources = first in OF_EVERY_PART or source not in (*SINGLE, lead)
    return f"{name}/{source}" if has_several_sources else name


def table() -> str:
    """All metrics as a Markdown table."""
    rows = ["| metric | meaning |", "|---|---|"]
    for spec in METRICS:
        suffix = " (counter)" if spec.kind == "counter" else ""
        rows.append(f"| `{spec.name}` | {spec.meaning}{suffix} |")
    return "\n".join(rows)


def _pattern(name: str) -> re.Pattern[str]:
    """The names of a metric. A piece in braces matches anything without a slash, but the name of a
    reward may have slashes.
    """
    pattern = ""
    for piece in re.split(r"(\{\w+\})", name):
        if piece == "{reward}":
            pattern += "(.+)"
        elif piece.startswith("{"):
            pattern += "([^/]+)"
        else:
            pattern += re.escape(piece)
    return re.compile(pattern)


# If a name matches several metrics, it belongs to the one with the fewest labels.
_PATTERNS = tuple(
    (spec, _pattern(spec.name)) for spec in sorted(METRICS, key=lambda spec: len(spec.labels))
)


if __name__ == "__main__":
    print(table())
