"""Reads from the newest records of a run what a simulation of it needs. What is read does not grow
with the run; of each partition with rollouts it is enough for some whole groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from streamrl.config import topology
from streamrl.config.checks.envs import DEMONSTRATIONS
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import Env
from streamrl.extensions.advisor.engine import Answered, measure_engine
from streamrl.extensions.advisor.facts import (
    Call,
    Facts,
    Load,
    Measured,
    Request,
    SampledGroup,
    SampledRollout,
    Step,
)
from streamrl.run.monitoring.metric_validation import validate_metric
from streamrl.run.monitoring.time_account import SETTLED_S, TimeAccount, load_pause_s, shares
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Message, TopicPartition, partitions_of
from streamrl.stream.log.reading import read_partitions
from streamrl.stream.log.records_of import record_in
from streamrl.stream.records import Fate, Metric, PolicyVersion, Record, Rollout, Turn
from streamrl.system.errors import ConfigError

# The newest messages of a topic that are read, of all of its partitions together.
VERSIONS = 600  # Each comes with a marker of its transaction.
METRICS = 80_000
FATES = 20_000
ROLLOUTS = 4_000
LEAST_OF_PARTITION = 16
LEAST_GROUPS = 3  # of each partition with rollouts, so that some of them are whole
SKIPPED = 5  # steps of a run that do not count: the learner compiles, and nothing is full yet
LEAST_STEPS = 10
# The run was away in the time between two versions that is longer than this, and so many times as
# long as most others.
AWAY_S = 60.0
AWAY = 20

R = TypeVar("R", bound=Record)


class _Answered(NamedTuple):
    """A model call as it was recorded."""

    server: str
    begun: float
    ended: float
    tokens: int


def read_facts(run: RunFile, log: Log) -> tuple[Facts, Measured]:
    """The facts of the newest steps of a run, and what it did in them. Raises ConfigError if there
    are too few.
    """
    versions = newest_versions(run, log)
    times = list(versions.values())
    since_s = times[0]
    newest = max(versions)
    metrics = list[Metric]()
    for message in recent(log, [topology.METRICS], METRICS, since_s):
        metric = validate_metric(to_event(message, ("metric",)), newest)
        if metric is not None and is_of_loop(run, metric):
            metrics.append(metric)
    rollouts = list(recent_rollouts(run, log, since_s))
    account = time_account(run, versions, metrics)
    servers = Counter[str]()
    for causes in account.servers_s.values():
        servers.update(causes)
    tokens, tokens_s = tokens_by_fate(run, log, since_s, times[-1])
    measured = Measured(
        steps=len(times) - 1,
        steps_per_s=(len(times) - 1) / (times[-1] - since_s),
        tokens_per_s=tokens.total() / tokens_s,
        expired_frac=tokens["expired"] / max(tokens.total(), 1),
        learner=shares(account.learner_s),
        servers=shares(servers),
    )
    return facts_of(run, versions, metrics, rollouts), measured


def newest_versions(run: RunFile, log: Log) -> dict[int, float]:
    """When the newest versions were first announced, in order."""
    announced = dict[int, float]()
    for message in recent(log, [topology.POLICY_VERSIONS], VERSIONS, 0.0):
        record = record_in(message, PolicyVersion)
        if record is not None and record.learner == run.learner.name:
            announced.setdefault(record.version, record.time_s or message.timestamp_s)
    first = run.fork.version if run.fork else 0
    return steady_versions(run.run, announced, first)


def steady_versions(run: str, announced: Mapping[int, float], first: int) -> dict[int, float]:
    """The versions since the run was away last, but for the first ones of the run. Raises
    ConfigError if there are too few.
    """
    numbers = sorted(version for version in announced if version >= first + SKIPPED)
    times = [announced[number] for number in numbers]
    between = [later - earlier for earlier, later in pairwise(times)]
    usual_s = median(between) if between else 0.0
    begin = 0
    for index, gap_s in enumerate(between):
        if gap_s > max(AWAY_S, AWAY * usual_s):
            begin = index + 1
    kept = numbers[begin:]
    if len(kept) <= LEAST_STEPS:
        raise ConfigError(
            f"run {run} has {max(len(kept) - 1, 0)} steps that can be measured, and advice needs"
            f" {LEAST_STEPS}; ask again when the run has {LEAST_STEPS + SKIPPED} steps since it was"
            " started"
        )
    return {number: announced[number] for number in kept}


def tokens_by_fate(
    run: RunFile, log: Log, since_s: float, until_s: float
) -> tuple[Counter[str], float]:
    """The sampled tokens that met each fate, and the seconds in which they did: those between the
    two times, or from the first fate on that is read, if there are too many to read all.
    """
    tokens = Counter[str]()
    begun_s: float | None = None
    for message in recent(log, [topology.FATES], FATES, 0.0):
        if begun_s is None:
            is_cut = message.offset > 0
            begun_s = max(since_s, message.timestamp_s) if is_cut else since_s
        if not begun_s <= message.timestamp_s <= until_s:
            continue
        fate = record_in(message, Fate)
        if fate is None or fate.tokens is None:
            continue
        if fate.environment not in run.envs or is_sampled(run, fate.environment):
            tokens[fate.fate] += int(fate.tokens.sum())
    return tokens, max(until_s - (begun_s or since_s), 1e-9)


def recent_rollouts(run: RunFile, log: Log, since_s: float) -> Iterator[tuple[Rollout, float]]:
    """The newest rollouts of all envs, each with the time at which it was written."""
    # With the marker of its transaction a group has one more offset.
    least = Counter[str]()
    for env in run.envs:
        least[topology.rollouts(env)] += LEAST_GROUPS * (run.buffer_of(env).group_size + 1)
    for message in recent(log, list(least), ROLLOUTS, since_s, least):
        rollout = record_in(message, Rollout)
        if rollout is not None and rollout.environment in run.envs:
            yield rollout, message.timestamp_s


def recent(
    log: Log,
    topics: Sequence[str],
    most: int,
    since_s: float,
    least: Mapping[str, int] | None = None,
) -> Iterator[Message]:
    """The newest messages of these topics, about `most` of all, that were written since then. Each
    partition is read from as many messages before its end as its part of `most`, and from at least
    so many as `least` has for its topic.
    """
    partitions = partitions_of(log, topics)
    begins = log.beginning_offsets(partitions)
    ends = log.end_offsets(partitions)
    share = most // len(partitions)
    starts = dict[TopicPartition, int]()
    for tp, begin in begins.items():
        count = max(share, LEAST_OF_PARTITION, (least or {}).get(tp[0], 0))
        starts[tp] = max(begin, ends[tp] - count)
    for message in read_partitions(log, starts, ends):
        if message.timestamp_s >= since_s:
            yield message


# ---- metrics -------------------------------------------------------------------------------------


def is_of_loop(run: RunFile, metric: Metric) -> bool:
    """Whether what is simulated has measured this. Other learners, and servers that only judge or
    evaluate, publish metrics of the same names.
    """
    measures = {name.partition("/")[0] for name in metric.values}
    if "learner" in measures:
        return metric.source == topology.learner_identity(run.learner.name)
    if "inference" in measures:
        # A server of another run has the name of that run before its own.
        server = metric.source.rpartition(".")[2]
        return server.rpartition("-")[0] in {
            topology.inference_part(env.pool, 0).rpartition("-")[0] for env in run.envs.values()
        }
    return True


def time_account(
    run: RunFile, versions: Mapping[int, float], metrics: Iterable[Metric]
) -> TimeAccount:
    """Where the time in these metrics went. The account keeps the newest versions only, so that
    each version is added with the metrics of its time. `versions`: when each was announced.
    """
    account = TimeAccount(topology.learner_identity(run.learner.name), run.batcher.lookahead)
    announced = deque(versions.items())
    for metric in metrics:
        # By its clock a server may have loaded a version before it was announced.
        while announced and announced[0][1] <= metric.time_s + SETTLED_S:
            account.add_version(*announced.popleft())
        account.add_metric(metric)
    account.finish()
    return account


# ---- facts ---------------------------------------------------------------------------------------


def facts_of(
    run: RunFile,
    versions: Mapping[int, float],
    metrics: Sequence[Metric],
    rollouts: Sequence[tuple[Rollout, float]],
) -> Facts:
    """The facts in these records. `versions`: when each was announced. `metrics`: of the loop.
    `rollouts`: each with the time at which it was written. Raises ConfigError if the records lack
    steps, groups or model calls.
    """
    trained = {
        metric.step: metric
        for metric in metrics
        if metric.step is not None and metric.step in versions and "learner/step_s" in metric.values
    }
    if not trained:
        raise ConfigError(f"run {run.run}: its newest records have no steps of the learner")
    steps = [step_of(metric, versions.get(k + 1)) for k, metric in trained.items()]
    by_group = defaultdict[tuple[str, str], list[tuple[Rollout, float]]](list)
    for rollout, time_s in rollouts:
        by_group[rollout.environment, rollout.group_id].append((rollout, time_s))
    groups = defaultdict[str, list[SampledGroup]](list)
    for (env, _), members in by_group.items():
        is_whole = len(members) == run.buffer_of(env).group_size
        if is_whole and not all(rollout.failure for rollout, _ in members):
            groups[env].append(sampled_group(members, is_sampled(run, env)))
    if not groups:
        raise ConfigError(
            f"run {run.run}: its newest records have no whole group of {', '.join(run.envs)} in"
            " which a rollout has not failed; `streamrl status` has the cause of the last failure"
        )
    requests = requests_of(run, by_group.values())
    if not requests:
        raise ConfigError(
            f"run {run.run}: the newest rollouts of {', '.join(run.envs)} have no model calls, so"
            " nothing is known of its servers"
        )
    pauses = pauses_of(metrics, versions)
    return Facts(
        steps=steps,
        loads=loads_of(metrics),
        engines={
            pool: measure_engine(
                [Answered(of, pauses.get(server, [])) for server, of in of_pool.items()],
                run.inference.of_pool(pool).max_num_seqs,
            )
            for pool, of_pool in requests.items()
        },
        servers={pool: len(of_pool) for pool, of_pool in requests.items()},
        groups=dict(groups),
        hops_s=hops_of(metrics, trained),
        fractions=fractions_of(run, metrics),
    )


def step_of(metric: Metric, announced_s: float | None) -> Step:
    """A step of the learner, by its metrics. Its wait for the version before does not count."""
    values = metric.values
    publish_s = values.get("learner/publish_s", 0.0)
    wait_s = values.get("learner/publish_wait_s", 0.0)
    trained_s = metric.time_s - publish_s  # when training ended
    if announced_s is None:
        announced_s = metric.time_s
    return Step(
        train_s=values["learner/step_s"],
        publish_s=max(publish_s - wait_s, 0.0),
        announce_s=max(announced_s - trained_s - wait_s, 0.0),
    )


def loads_of(metrics: Iterable[Metric]) -> list[Load]:
    return [load_of(metric.values) for metric in metrics if "inference/swap_s" in metric.values]


def load_of(values: Mapping[str, float]) -> Load:
    """A load by its metrics. What of it is no pause comes before it serves."""
    pause_s = load_pause_s(values)
    copied_s = values.get("inference/heard_s", 0.0) + values.get("inference/pull_s", 0.0)
    return Load(copied_s + values["inference/swap_s"] - pause_s, pause_s)


def pauses_of(
    metrics: Iterable[Metric], versions: Mapping[int, float]
) -> dict[str, list[tuple[float, float]]]:
    """When each server was paused for a version."""
    pauses = defaultdict[str, list[tuple[float, float]]](list)
    for metric in metrics:
        announced_s = versions.get(-1 if metric.step is None else metric.step)
        if announced_s is not None:
            for load in loads_of([metric]):
                begin_s = announced_s + load.delay_s
                pauses[metric.source].append((begin_s, begin_s + load.pause_s))
    return pauses


def hops_of(metrics: Iterable[Metric], trained: Mapping[int, Metric]) -> list[float]:
    """The times from a part that makes a record to the next one that reads it: from each batch that
    the learner waited for to the beginning of its step. All parts take about as long.
    """
    built_s = {
        metric.step: metric.time_s
        for metric in metrics
        if metric.step is not None and "batcher/tokens_total" in metric.values
    }
    hops = list[float]()
    for number, metric in trained.items():
        values = metric.values
        begun_s = metric.time_s - values["learner/step_s"] - values.get("learner/publish_s", 0.0)
        idle_s = values.get("learner/idle_s", 0.0)
        if number in built_s and begun_s - idle_s < built_s[number] <= begun_s:
            hops.append(begun_s - built_s[number])
    return hops


def fractions_of(run: RunFile, metrics: Iterable[Metric]) -> dict[str, float]:
    """The mean fraction of each env that a curriculum wanted; empty without one."""
    wanted = defaultdict[str, list[float]](list)
    for metric in metrics:
        for env in run.envs if "batcher/curriculum_stage" in metric.values else ():
            wanted[env].append(metric.values.get(f"batches/{env}/frac_wanted", 0.0))
    return {env: fmean(values) for env, values in wanted.items()}


# ---- rollouts ------------------------------------------------------------------------------------


def is_sampled(run: RunFile, env: str) -> bool:
    """Whether the policy samples the answers of an env. A server only scores demonstrations."""
    return (run.envs[env].kind or env) not in DEMONSTRATIONS


def calls_of(rollout: Rollout) -> list[_Answered]:
    """The model calls of a rollout whose times are known, in their order."""
    calls = [_answered(turn) for turn in rollout.turns]
    return sorted((call for call in calls if call is not None), key=lambda call: call.ended)


def _answered(turn: Turn) -> _Answered | None:
    metadata = turn.inference_metadata
    if metadata is None or turn.timestamp is None or not turn.token_count:
        return None
    begun = turn.timestamp - metadata.latency_s
    return _Answered(metadata.server, begun, turn.timestamp, turn.token_count)


def sampled_group(members: Sequence[tuple[Rollout, float]], has_calls: bool = True) -> SampledGroup:
    """A group by its rollouts and the times at which they were written. Its calls are left out if
    they have not sampled anything.
    """
    rollouts = list[SampledRollout]()
    answered_s = 0.0
    for rollout, _ in members:
        calls = calls_of(rollout) if has_calls and not rollout.failure else []
        answered_s = max([answered_s, *(call.ended for call in calls)])
        ends = [calls[0].begun, *(call.ended for call in calls)] if calls else []
        waits = [max(call.begun - end, 0.0) for call, end in zip(calls, ends, strict=False)]
        rollouts.append(
            SampledRollout(
                [Call(wait, call.tokens) for wait, call in zip(waits, calls, strict=True)],
                0 if rollout.failure else rollout.total_tokens,
                rollout.reward,
            )
        )
    written_s = max(time_s for _, time_s in members)
    return SampledGroup(rollouts, max(written_s - answered_s, 0.0) if answered_s else 0.0)


def requests_of(
    run: RunFile, groups: Iterable[Sequence[tuple[Rollout, float]]]
) -> dict[str, dict[str, list[Request]]]:
    """The requests of these groups, by pool and server. The first answers of a group are of one
    request, unless agents asked for them.
    """
    requests = dict[str, dict[str, list[Request]]]()
    for members in groups:
        name = members[0][0].environment
        if not is_sampled(run, name):
            continue
        env = run.envs[name]
        calls = [calls_of(rollout) for rollout, _ in members]
        shared = list[_Answered]()
        if isinstance(env, Env):
            shared = [of_rollout[0] for of_rollout in calls if of_rollout]
            calls = [of_rollout[1:] for of_rollout in calls]
        alone = [[call] for of_rollout in calls for call in of_rollout]
        for answered in ([shared] if shared else []) + alone:
            request = Request(
                min(call.begun for call in answered),
                min(call.ended for call in answered),
                tuple(call.tokens for call in answered),
            )
            of_pool = requests.setdefault(env.pool, {})
            of_pool.setdefault(answered[0].server, []).append(request)
    return requests
