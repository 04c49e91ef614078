"""Every metric: its name, its unit, what it says. One list for the topic `metrics`, for Prometheus,
for the sinks and for docs/metrics.md.

A piece of a name in braces stands for a name of the run (an env, a topic, a server); in Prometheus
it is a label. `replays/` and `batches/` are those of docs/design/overview.md. `python -m
streamrl.monitoring.metric_names` prints the table of docs/metrics.md.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

from streamrl.config import topology

PREFIX = "streamrl"
OF_EVERY_PART = ("part", "worker")  # first pieces of what every part measures of itself
# Sources of which a run has one; the lead learner, whose name is the run's choice, is another.
SINGLE = tuple(role.name for role in topology.ROLES)


class MetricSpec(NamedTuple):
    """One metric. A counter only grows in the life of its part; anything else is a gauge."""

    name: str
    unit: str  # 1: a plain number or a share
    meaning: str
    kind: Literal["gauge", "counter"] = "gauge"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @property
    def prometheus(self) -> str:
        """Its name there."""
        return prometheus_name(re.sub(r"\{\w+\}", "", self.name)) + (
            "_total" if self.kind == "counter" else ""
        )


MEASURES = (
    # ---- of every part: what its log sees of it (log/instrumented.py)
    MetricSpec(
        "part/ready",
        "1",
        "1 once the part can do its work: state restored; a server: weights loaded and probed",
    ),
    MetricSpec("part/since_turn_s", "s", "since the part's loop last turned"),
    MetricSpec(
        "part/lag_records/{topic}",
        "records",
        "of an input not taken yet: offsets to its end, which count the markers of transactions",
    ),
    MetricSpec(
        "part/read_records/{topic}", "records", "taken from an input in this life", "counter"
    ),
    MetricSpec(
        "part/written_records/{topic}", "records", "committed to an output in this life", "counter"
    ),
    MetricSpec(
        "part/dead_letters/{topic}",
        "records",
        "of an input that could not be used and were put aside, in this life",
        "counter",
    ),
    MetricSpec("part/transactions", "transactions", "committed in this life", "counter"),
    MetricSpec("part/transactions_s", "s", "that they took together", "counter"),
    MetricSpec("part/transaction_s", "s", "that the last one took"),
    MetricSpec("part/transaction_max_s", "s", "that the longest of the last minute took"),
    MetricSpec("part/since_transaction_s", "s", "since the last one, or since the part began"),
    # ---- buffer and batcher: the loop (processor/processor.py)
    MetricSpec("worker/events_per_s", "records/s", "folded"),
    MetricSpec("worker/turn_s", "s", "one batch of the loop takes, mean"),
    MetricSpec("worker/busy_frac", "1", "share of time spent in turns"),
    MetricSpec(
        "worker/invalid_frac/{topic}",
        "1",
        "share of the last 1,000 records that could not be used, where there were any",
    ),
    MetricSpec(
        "worker/left_alone_s/{topic}",
        "s",
        "for which the topic is not read, as it carried mostly invalid records",
    ),
    # ---- buffer
    MetricSpec("buffer/version", "version", "newest policy version that it has heard of"),
    MetricSpec("buffer/window_tokens/{environment}", "tokens", "in open groups: the window"),
    MetricSpec(
        "replays/{environment}/rollouts_in_buffer",
        "rollouts",
        "in closed groups that wait for a batch, when one is made",
    ),
    MetricSpec(
        "replays/{environment}/tokens_in_buffer",
        "tokens",
        "the same; those of open groups are in buffer/window_tokens",
    ),
    MetricSpec(
        "replays/{environment}/frac_on_policy",
        "1",
        "share of the rollouts held that the newest version made",
    ),
    MetricSpec(
        "replays/{environment}/frac_used_in_batch",
        "1",
        "share of the rollouts held that the batch took",
    ),
    MetricSpec(
        "replays/{environment}/new_rollouts", "rollouts", "that came in between two versions"
    ),
    MetricSpec("replays/{environment}/new_tokens", "tokens", "of those, prompts included"),
    MetricSpec("replays/{environment}/new_generated_tokens", "tokens", "of those, sampled"),
    MetricSpec("replays/{environment}/new_failed", "rollouts", "that came in without an answer"),
    MetricSpec(
        "replays/{environment}/new_misaligned",
        "rollouts",
        "that came in with tokens that the policy cannot have seen",
    ),
    MetricSpec(
        "replays/{environment}/suspicious_logprobs",
        "rollouts",
        "that came in with 8 tokens or more, all of logprob exactly 0",
    ),
    MetricSpec(
        "replays/{environment}/zero_advantage_groups", "groups", "in which all advantages are 0"
    ),
    MetricSpec(
        "replays/{environment}/frac_truncated", "1", "share of the new rollouts that a limit ended"
    ),
    MetricSpec("replays/{environment}/reward/mean", "reward", "of the new rollouts"),
    MetricSpec(
        "replays/{environment}/reward/std", "reward", "of the new rollouts, standard deviation"
    ),
    MetricSpec(
        "replays/{environment}/rewards/{reward}/mean",
        "reward",
        "of the new rollouts, one named reward",
    ),
    MetricSpec(
        "replays/{environment}/rewards/{reward}/std",
        "reward",
        "of the new rollouts, one named reward, standard deviation",
    ),
    # ---- batcher
    MetricSpec("batcher/version", "version", "newest policy version that it has heard of"),
    MetricSpec("batcher/next_batch", "batch", "number of the batch that is being filled"),
    MetricSpec("batcher/blocked_s", "s", "for which the next batch has waited for tokens"),
    MetricSpec("batcher/waited_for_data_s", "s", "that a batch waited while no share was complete"),
    MetricSpec(
        "batcher/waited_for_share_s/{environment}",
        "s",
        "that a batch waited for this share alone; `rest`: for what the fractions leave",
    ),
    MetricSpec(
        "batcher/missing_tokens/{environment}",
        "tokens",
        "that the next batch is short of; `rest`: what the fractions leave to all envs",
    ),
    MetricSpec("batcher/held_tokens/{environment}", "tokens", "in groups ready for a batch"),
    MetricSpec("batcher/tokens_total", "tokens", "of a batch"),
    MetricSpec("batcher/rows_filled_frac", "1", "share of a batch's positions that hold a token"),
    MetricSpec("batcher/padding_frac", "1", "share of a batch's positions that hold none"),
    MetricSpec(
        "batcher/imbalance_frac",
        "1",
        "1 - mean / max of the costs of the processes' rows: the part of a step that they wait for"
        " the slowest",
    ),
    MetricSpec("batcher/token_imbalance_frac", "1", "the same in tokens"),
    MetricSpec("batcher/process_rollouts_min", "rollouts", "of the process that has the fewest"),
    MetricSpec(
        "batcher/batch_age_mean",
        "versions",
        "age of a batch's rollouts: batch number less version of the oldest token (staleness)",
    ),
    MetricSpec("batcher/batch_age_max", "versions", "the oldest"),
    MetricSpec(
        "batcher/mixed_versions_frac",
        "1",
        "share of a batch's rollouts that more than one version sampled",
    ),
    MetricSpec("batcher/curriculum_stage", "stage", "that the batch belongs to, counted from 0"),
    MetricSpec("batches/{environment}/rollouts_used", "rollouts", "in a batch"),
    MetricSpec("batches/{environment}/tokens_used", "tokens", "in a batch"),
    MetricSpec("batches/{environment}/frac_used", "1", "share of a batch's tokens"),
    MetricSpec("batches/{environment}/frac_wanted", "1", "share that the curriculum wanted"),
    MetricSpec("batches/{environment}/reward/mean", "reward", "of the rollouts in a batch"),
    MetricSpec(
        "batches/{environment}/mixed_versions_frac",
        "1",
        "share of the env's rollouts in a batch that more than one version sampled",
    ),
    MetricSpec(
        "batches/{environment}/age/mean", "versions", "age of the env's rollouts in a batch"
    ),
    # ---- learner
    MetricSpec("learner/loss", "1", "that is minimised"),
    MetricSpec("learner/policy_loss", "1", "the part of it without the divergence"),
    MetricSpec("learner/kl", "nats", "divergence from the reference, a token, by learner.kl"),
    MetricSpec("learner/grad_norm", "1", "before clipping"),
    MetricSpec("learner/entropy", "nats", "of the policy, a token"),
    MetricSpec(
        "learner/ratio_mean", "1", "probability of a token now over that when it was sampled"
    ),
    MetricSpec("learner/ratio_max", "1", "the largest"),
    MetricSpec("learner/clip_fraction", "1", "share of tokens whose ratio is clipped"),
    MetricSpec(
        "learner/mismatch_kl",
        "nats",
        "divergence of the policy that sampled from the learner's, k3, a token",
    ),
    MetricSpec("learner/rejected_frac", "1", "share of tokens that learner.correction keeps out"),
    MetricSpec(
        "learner/effective_sample_size", "1", "of the importance weights, as a share of the samples"
    ),
    MetricSpec(
        "learner/masked_sequences",
        "sequences",
        "of the batch that cannot be trained on: an unknown token id, a temperature out of range",
    ),
    MetricSpec(
        "learner/skipped",
        "1",
        "1 where nothing was trained on the batch, because its loss or gradient was not finite",
    ),
    MetricSpec("learner/step_s", "s", "a step of training takes"),
    MetricSpec("learner/idle_s", "s", "that it waited for the batch"),
    MetricSpec(
        "learner/publish_s",
        "s",
        "that training stood still for the version; the rest of its stages goes on beside the next"
        " step",
    ),
    MetricSpec("learner/publish_wait_s", "s", "of it, until the version before was announced"),
    MetricSpec(
        "learner/export_s", "s", "to take the version's weights out of the model and write them"
    ),
    MetricSpec("learner/hash_s", "s", "to hash them"),
    MetricSpec(
        "learner/probe_s", "s", "to compute the version's probe, while its weights are written"
    ),
    MetricSpec("learner/announce_s", "s", "to announce the version"),
    MetricSpec("learner/checkpoint_s", "s", "to write a checkpoint, where it was due"),
    MetricSpec("learner/tokens_per_s", "tokens/s", "trained on within a step"),
    MetricSpec(
        "learner/batch_age_mean",
        "versions",
        "as batcher/batch_age_mean, of the batch just trained on",
    ),
    MetricSpec("learner/batch_age_max", "versions", "the oldest"),
    # ---- envs
    MetricSpec("env/groups_in_flight", "groups", "being sampled"),
    MetricSpec("env/groups_outstanding", "groups", "launched and not closed yet"),
    MetricSpec("env/groups_capacity", "groups", "that may be outstanding by now"),
    MetricSpec("env/rollouts_per_s", "rollouts/s", "published"),
    MetricSpec("env/failed", "rollouts", "published as failed since the last report"),
    MetricSpec("env/waiting_for_demand_s", "s", "for which nobody has said what is wanted"),
    MetricSpec("env/left_out", "problems", "that rest, by their pass rate, in this life"),
    MetricSpec("env/truncated/{limit}", "rollouts", "ended by that limit since the last report"),
    MetricSpec("env/forks", "turns", "that began another sequence since the last report"),
    MetricSpec("env/reward_mean", "reward", "of rollouts published since the last report"),
    MetricSpec("env/request_s", "s", "a request to a server takes, mean"),
    MetricSpec(
        "inference_context/rollouts", "rollouts", "made with an inference context", "counter"
    ),
    MetricSpec(
        "inference_context/misaligned", "rollouts", "whose tokens are not the server's", "counter"
    ),
    MetricSpec("inference_context/short", "rollouts", "of very few tokens", "counter"),
    MetricSpec(
        "inference_context/unchecked",
        "rollouts",
        "whose prompt ids were not sent, so that nothing was compared",
        "counter",
    ),
    MetricSpec(
        "inference_context/suspicious",
        "rollouts",
        "with logprobs that are all 0, above 0 or far below what is sampled",
        "counter",
    ),
    MetricSpec(
        "inference_context/template_failures",
        "prompts",
        "that the chat template refused",
        "counter",
    ),
    # ---- inference
    MetricSpec("inference/in_flight", "sequences", "running or waiting in vLLM"),
    MetricSpec("inference/generated_tokens", "tokens", "since vLLM started", "counter"),
    MetricSpec("inference/asked_s", "s", "of vLLM's life in which there was a request", "counter"),
    MetricSpec(
        "inference/paused_s",
        "s",
        "of vLLM's life in which it stood still for new weights",
        "counter",
    ),
    MetricSpec("inference/idle_s", "s", "of vLLM's life in which nobody asked anything", "counter"),
    MetricSpec(
        "inference/heard_s",
        "s",
        "from a version's announcement until its weights were fetched, by both machines' clocks",
    ),
    MetricSpec("inference/pull_s", "s", "to copy and check a version's weights"),
    MetricSpec("inference/start_s", "s", "to start vLLM"),
    MetricSpec("inference/swap_s", "s", "from pause to resume with new weights"),
    MetricSpec("inference/pause_s", "s", "of that, until vLLM stood still"),
    MetricSpec("inference/reload_s", "s", "of that, to load the weights"),
    MetricSpec("inference/resume_s", "s", "of that, to go on with the requests"),
    MetricSpec(
        "inference/mismatch_max_abs",
        "nats",
        "largest difference of a logprob from the learner's, by the last probe",
    ),
    MetricSpec("inference/mismatch_tokens", "tokens", "compared for it"),
    # ---- scorer
    MetricSpec("scorer/idle_s", "s", "that it waited for a batch of its own"),
    MetricSpec("scorer/score_s", "s", "to score one"),
    MetricSpec("scorer/tokens_per_s", "tokens/s", "scored"),
    MetricSpec(
        "scorer/not_finite_tokens",
        "tokens",
        "of a batch of which the reference says nothing finite; they are given the policy's"
        " logprob",
    ),
    MetricSpec("scorer/reference_version", "version", "of the reference; -1: a model of its own"),
    # ---- evaluation
    MetricSpec(
        "evals/behind_versions", "versions", "announced since the one that is being evaluated"
    ),
    MetricSpec(
        "evals/{evaluation}/pass@{k}", "1", "share of held-out problems solved with k answers"
    ),
    MetricSpec("evals/{evaluation}/reward", "reward", "of the answers, mean"),
    MetricSpec("evals/{evaluation}/repeated", "answers", "thrown away and asked again"),
    # ---- orchestrator: the run as a whole
    MetricSpec(
        "orchestrator/active_s", "s", "that the run has had a server, over all its sessions"
    ),
    MetricSpec("orchestrator/running/{process}", "1", "1 while it runs"),
    MetricSpec("orchestrator/restarts/{process}", "restarts", "by this orchestrator", "counter"),
    MetricSpec(
        "orchestrator/version", "version", "newest policy version announced: training steps done"
    ),
    MetricSpec("orchestrator/since_version_s", "s", "since it was announced"),
    MetricSpec("orchestrator/batch", "batch", "number of the newest batch"),
    MetricSpec(
        "orchestrator/fates/{environment}/{fate}",
        "rollouts",
        "that have ended so, since the run began",
        "counter",
    ),
    MetricSpec(
        "orchestrator/server_ready/{server}", "1", "1 while the server says that it is ready"
    ),
    MetricSpec(
        "orchestrator/server_behind/{server}",
        "versions",
        "that the server is behind the newest announced",
    ),
    MetricSpec("orchestrator/server_silent_s/{server}", "s", "since the server's last heartbeat"),
)


def prometheus_name(name: str) -> str:
    """A name as Prometheus takes it."""
    return f"{PREFIX}_{re.sub('[^a-zA-Z0-9]+', '_', name).strip('_')}"


@cache
def find_metric(name: str) -> tuple[MetricSpec, tuple[str, ...]] | None:
    """Which metric a name is of, and what stands for its braces; None for one that is not in the
    list.
    """
    for known, pattern in _PATTERNS:
        if found := pattern.fullmatch(name):
            return known, found.groups()
    return None


def series_name(source: str, name: str, lead: str) -> str:
    """What a value's curve is called where there is one namespace for the whole run: its name, with
    the part behind it where each part has its own.

    `lead`: the source whose `learner/` is the run's.
    """
    first = name.split("/", 1)[0]
    own = first in OF_EVERY_PART or source not in (*SINGLE, lead)
    return f"{name}/{source}" if own else name


def table() -> str:
    """The metrics in Markdown."""
    rows = ["| metric | in Prometheus | unit | meaning |", "|---|---|---|---|"]
    for known in MEASURES:
        labels = f"`{{{', '.join(known.labels)}}}`" if known.labels else ""
        rows.append(
            f"| `{known.name}` | `{known.prometheus}`{labels} | {known.unit} | {known.meaning} |"
        )
    return "\n".join(rows)


def _pattern(name: str) -> re.Pattern[str]:
    """A piece in braces stands for anything without a slash; the last one, and a reward's name, for
    anything.
    """
    pieces = re.split(r"(\{\w+\})", name)
    return re.compile(
        "".join(
            (
                "(.+)"
                if piece in ("{reward}",)
                else "([^/]+)"
                if piece.startswith("{")
                else re.escape(piece)
            )
            for piece in pieces
        )
    )


_PATTERNS = tuple(
    (known, _pattern(known.name)) for known in sorted(MEASURES, key=lambda known: len(known.labels))
)


if __name__ == "__main__":
    print(table())
