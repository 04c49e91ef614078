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


class Measure(NamedTuple):
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
        return exposed(re.sub(r"\{\w+\}", "", self.name)) + (
            "_total" if self.kind == "counter" else ""
        )


MEASURES = (
    # ---- of every part: what its log sees of it (log/instrumented.py)
    Measure(
        "part/ready",
        "1",
        "1 once the part can do its work: state restored; a server: weights loaded and probed",
    ),
    Measure("part/since_turn_s", "s", "since the part's loop last turned"),
    Measure(
        "part/lag_records/{topic}",
        "records",
        "of an input not taken yet: offsets to its end, which count the markers of transactions",
    ),
    Measure("part/read_records/{topic}", "records", "taken from an input in this life", "counter"),
    Measure(
        "part/written_records/{topic}", "records", "committed to an output in this life", "counter"
    ),
    Measure(
        "part/dead_letters/{topic}",
        "records",
        "of an input that could not be used and were put aside, in this life",
        "counter",
    ),
    Measure("part/transactions", "transactions", "committed in this life", "counter"),
    Measure("part/transactions_s", "s", "that they took together", "counter"),
    Measure("part/transaction_s", "s", "that the last one took"),
    Measure("part/transaction_max_s", "s", "that the longest of the last minute took"),
    Measure("part/since_transaction_s", "s", "since the last one, or since the part began"),
    # ---- buffer and batcher: the loop (processor/processor.py)
    Measure("worker/events_per_s", "records/s", "folded"),
    Measure("worker/turn_s", "s", "one batch of the loop takes, mean"),
    Measure("worker/busy_frac", "1", "share of time spent in turns"),
    Measure(
        "worker/invalid_frac/{topic}",
        "1",
        "share of the last 1,000 records that could not be used, where there were any",
    ),
    Measure(
        "worker/left_alone_s/{topic}",
        "s",
        "for which the topic is not read, as it carried mostly invalid records",
    ),
    # ---- buffer
    Measure("buffer/version", "version", "newest policy version that it has heard of"),
    Measure("buffer/window_tokens/{environment}", "tokens", "in open groups: the window"),
    Measure(
        "replays/{environment}/rollouts_in_buffer",
        "rollouts",
        "in closed groups that wait for a batch, when one is made",
    ),
    Measure(
        "replays/{environment}/tokens_in_buffer",
        "tokens",
        "the same; those of open groups are in buffer/window_tokens",
    ),
    Measure(
        "replays/{environment}/frac_on_policy",
        "1",
        "share of the rollouts held that the newest version made",
    ),
    Measure(
        "replays/{environment}/frac_used_in_batch",
        "1",
        "share of the rollouts held that the batch took",
    ),
    Measure("replays/{environment}/new_rollouts", "rollouts", "that came in between two versions"),
    Measure("replays/{environment}/new_tokens", "tokens", "of those, prompts included"),
    Measure("replays/{environment}/new_generated_tokens", "tokens", "of those, sampled"),
    Measure("replays/{environment}/new_failed", "rollouts", "that came in without an answer"),
    Measure(
        "replays/{environment}/new_misaligned",
        "rollouts",
        "that came in with tokens that the policy cannot have seen",
    ),
    Measure(
        "replays/{environment}/suspicious_logprobs",
        "rollouts",
        "that came in with 8 tokens or more, all of logprob exactly 0",
    ),
    Measure(
        "replays/{environment}/zero_advantage_groups", "groups", "in which all advantages are 0"
    ),
    Measure(
        "replays/{environment}/frac_truncated", "1", "share of the new rollouts that a limit ended"
    ),
    Measure("replays/{environment}/reward/mean", "reward", "of the new rollouts"),
    Measure(
        "replays/{environment}/reward/std", "reward", "of the new rollouts, standard deviation"
    ),
    Measure(
        "replays/{environment}/rewards/{reward}/mean",
        "reward",
        "of the new rollouts, one named reward",
    ),
    Measure(
        "replays/{environment}/rewards/{reward}/std",
        "reward",
        "of the new rollouts, one named reward, standard deviation",
    ),
    # ---- batcher
    Measure("batcher/version", "version", "newest policy version that it has heard of"),
    Measure("batcher/next_batch", "batch", "number of the batch that is being filled"),
    Measure("batcher/blocked_s", "s", "for which the next batch has waited for tokens"),
    Measure("batcher/waited_for_data_s", "s", "that a batch waited while no share was complete"),
    Measure(
        "batcher/waited_for_share_s/{environment}",
        "s",
        "that a batch waited for this share alone; `rest`: for what the fractions leave",
    ),
    Measure(
        "batcher/missing_tokens/{environment}",
        "tokens",
        "that the next batch is short of; `rest`: what the fractions leave to all envs",
    ),
    Measure("batcher/held_tokens/{environment}", "tokens", "in groups ready for a batch"),
    Measure("batcher/tokens_total", "tokens", "of a batch"),
    Measure("batcher/rows_filled_frac", "1", "share of a batch's positions that hold a token"),
    Measure("batcher/padding_frac", "1", "share of a batch's positions that hold none"),
    Measure(
        "batcher/imbalance_frac",
        "1",
        "1 - mean / max of the costs of the processes' rows: the part of a step that they wait for the slowest",
    ),
    Measure("batcher/token_imbalance_frac", "1", "the same in tokens"),
    Measure("batcher/process_rollouts_min", "rollouts", "of the process that has the fewest"),
    Measure(
        "batcher/batch_age_mean",
        "versions",
        "age of a batch's rollouts: batch number less version of the oldest token (staleness)",
    ),
    Measure("batcher/batch_age_max", "versions", "the oldest"),
    Measure(
        "batcher/mixed_versions_frac",
        "1",
        "share of a batch's rollouts that more than one version sampled",
    ),
    Measure("batcher/curriculum_stage", "stage", "that the batch belongs to, counted from 0"),
    Measure("batches/{environment}/rollouts_used", "rollouts", "in a batch"),
    Measure("batches/{environment}/tokens_used", "tokens", "in a batch"),
    Measure("batches/{environment}/frac_used", "1", "share of a batch's tokens"),
    Measure("batches/{environment}/frac_wanted", "1", "share that the curriculum wanted"),
    Measure("batches/{environment}/reward/mean", "reward", "of the rollouts in a batch"),
    Measure(
        "batches/{environment}/mixed_versions_frac",
        "1",
        "share of the env's rollouts in a batch that more than one version sampled",
    ),
    Measure("batches/{environment}/age/mean", "versions", "age of the env's rollouts in a batch"),
    # ---- learner
    Measure("learner/loss", "1", "that is minimised"),
    Measure("learner/policy_loss", "1", "the part of it without the divergence"),
    Measure("learner/kl", "nats", "divergence from the reference, a token, by learner.kl"),
    Measure("learner/grad_norm", "1", "before clipping"),
    Measure("learner/entropy", "nats", "of the policy, a token"),
    Measure("learner/ratio_mean", "1", "probability of a token now over that when it was sampled"),
    Measure("learner/ratio_max", "1", "the largest"),
    Measure("learner/clip_fraction", "1", "share of tokens whose ratio is clipped"),
    Measure(
        "learner/mismatch_kl",
        "nats",
        "divergence of the policy that sampled from the learner's, k3, a token",
    ),
    Measure("learner/rejected_frac", "1", "share of tokens that learner.correction keeps out"),
    Measure(
        "learner/effective_sample_size", "1", "of the importance weights, as a share of the samples"
    ),
    Measure(
        "learner/masked_sequences",
        "sequences",
        "of the batch that cannot be trained on: an unknown token id, a temperature out of range",
    ),
    Measure(
        "learner/skipped",
        "1",
        "1 where nothing was trained on the batch, because its loss or gradient was not finite",
    ),
    Measure("learner/step_s", "s", "a step of training takes"),
    Measure("learner/idle_s", "s", "that it waited for the batch"),
    Measure(
        "learner/publish_s",
        "s",
        "that training stood still for the version; the rest of its stages goes on beside the next step",
    ),
    Measure("learner/publish_wait_s", "s", "of it, until the version before was announced"),
    Measure(
        "learner/export_s", "s", "to take the version's weights out of the model and write them"
    ),
    Measure("learner/hash_s", "s", "to hash them"),
    Measure(
        "learner/probe_s", "s", "to compute the version's probe, while its weights are written"
    ),
    Measure("learner/announce_s", "s", "to announce the version"),
    Measure("learner/checkpoint_s", "s", "to write a checkpoint, where it was due"),
    Measure("learner/tokens_per_s", "tokens/s", "trained on within a step"),
    Measure(
        "learner/batch_age_mean",
        "versions",
        "as batcher/batch_age_mean, of the batch just trained on",
    ),
    Measure("learner/batch_age_max", "versions", "the oldest"),
    # ---- envs
    Measure("env/groups_in_flight", "groups", "being sampled"),
    Measure("env/groups_outstanding", "groups", "launched and not closed yet"),
    Measure("env/groups_capacity", "groups", "that may be outstanding by now"),
    Measure("env/rollouts_per_s", "rollouts/s", "published"),
    Measure("env/failed", "rollouts", "published as failed since the last report"),
    Measure("env/waiting_for_demand_s", "s", "for which nobody has said what is wanted"),
    Measure("env/left_out", "problems", "that rest, by their pass rate, in this life"),
    Measure("env/truncated/{limit}", "rollouts", "ended by that limit since the last report"),
    Measure("env/forks", "turns", "that began another sequence since the last report"),
    Measure("env/reward_mean", "reward", "of rollouts published since the last report"),
    Measure("env/request_s", "s", "a request to a server takes, mean"),
    Measure("inference_context/rollouts", "rollouts", "made with an inference context", "counter"),
    Measure(
        "inference_context/misaligned", "rollouts", "whose tokens are not the server's", "counter"
    ),
    Measure("inference_context/short", "rollouts", "of very few tokens", "counter"),
    Measure(
        "inference_context/unchecked",
        "rollouts",
        "whose prompt ids were not sent, so that nothing was compared",
        "counter",
    ),
    Measure(
        "inference_context/suspicious",
        "rollouts",
        "with logprobs that are all 0, above 0 or far below what is sampled",
        "counter",
    ),
    Measure(
        "inference_context/template_failures",
        "prompts",
        "that the chat template refused",
        "counter",
    ),
    # ---- inference
    Measure("inference/in_flight", "sequences", "running or waiting in vLLM"),
    Measure("inference/generated_tokens", "tokens", "since vLLM started", "counter"),
    Measure("inference/asked_s", "s", "of vLLM's life in which there was a request", "counter"),
    Measure(
        "inference/paused_s",
        "s",
        "of vLLM's life in which it stood still for new weights",
        "counter",
    ),
    Measure("inference/idle_s", "s", "of vLLM's life in which nobody asked anything", "counter"),
    Measure(
        "inference/heard_s",
        "s",
        "from a version's announcement until its weights were fetched, by both machines' clocks",
    ),
    Measure("inference/pull_s", "s", "to copy and check a version's weights"),
    Measure("inference/start_s", "s", "to start vLLM"),
    Measure("inference/swap_s", "s", "from pause to resume with new weights"),
    Measure("inference/pause_s", "s", "of that, until vLLM stood still"),
    Measure("inference/reload_s", "s", "of that, to load the weights"),
    Measure("inference/resume_s", "s", "of that, to go on with the requests"),
    Measure(
        "inference/mismatch_max_abs",
        "nats",
        "largest difference of a logprob from the learner's, by the last probe",
    ),
    Measure("inference/mismatch_tokens", "tokens", "compared for it"),
    # ---- scorer
    Measure("scorer/idle_s", "s", "that it waited for a batch of its own"),
    Measure("scorer/score_s", "s", "to score one"),
    Measure("scorer/tokens_per_s", "tokens/s", "scored"),
    Measure(
        "scorer/not_finite_tokens",
        "tokens",
        "of a batch of which the reference says nothing finite; they are given the policy's logprob",
    ),
    Measure("scorer/reference_version", "version", "of the reference; -1: a model of its own"),
    # ---- evaluation
    Measure("evals/behind_versions", "versions", "announced since the one that is being evaluated"),
    Measure("evals/{evaluation}/pass@{k}", "1", "share of held-out problems solved with k answers"),
    Measure("evals/{evaluation}/reward", "reward", "of the answers, mean"),
    Measure("evals/{evaluation}/repeated", "answers", "thrown away and asked again"),
    # ---- orchestrator: the run as a whole
    Measure("orchestrator/active_s", "s", "that the run has had a server, over all its sessions"),
    Measure("orchestrator/running/{process}", "1", "1 while it runs"),
    Measure("orchestrator/restarts/{process}", "restarts", "by this orchestrator", "counter"),
    Measure(
        "orchestrator/version", "version", "newest policy version announced: training steps done"
    ),
    Measure("orchestrator/since_version_s", "s", "since it was announced"),
    Measure("orchestrator/batch", "batch", "number of the newest batch"),
    Measure(
        "orchestrator/fates/{environment}/{fate}",
        "rollouts",
        "that have ended so, since the run began",
        "counter",
    ),
    Measure("orchestrator/server_ready/{server}", "1", "1 while the server says that it is ready"),
    Measure(
        "orchestrator/server_behind/{server}",
        "versions",
        "that the server is behind the newest announced",
    ),
    Measure("orchestrator/server_silent_s/{server}", "s", "since the server's last heartbeat"),
)


def exposed(name: str) -> str:
    """A name as Prometheus takes it."""
    return f"{PREFIX}_{re.sub('[^a-zA-Z0-9]+', '_', name).strip('_')}"


@cache
def measure(name: str) -> tuple[Measure, tuple[str, ...]] | None:
    """Which metric a name is of, and what stands for its braces; None for one that is not in the
    list.
    """
    for known, pattern in _PATTERNS:
        if found := pattern.fullmatch(name):
            return known, found.groups()
    return None


def curve(source: str, name: str, lead: str) -> str:
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
            "(.+)"
            if piece in ("{reward}",)
            else "([^/]+)"
            if piece.startswith("{")
            else re.escape(piece)
            for piece in pieces
        )
    )


_PATTERNS = tuple(
    (known, _pattern(known.name)) for known in sorted(MEASURES, key=lambda known: len(known.labels))
)


if __name__ == "__main__":
    print(table())
