"""What the page shows, as plain values for JSON: pure functions of the fold's state, of one
rollout, and of the batch it was trained in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from streamrl.dashboard import loop
from streamrl.dashboard.index import FATES, IN_FLIGHT, NEVER, Query
from streamrl.dashboard.state import State, loop_at_step, published, rewards
from streamrl.monitoring.display import REWARD_BATCHES
from streamrl.monitoring.plot import SMOOTH_BATCHES, trailing_mean
from streamrl.monitoring.run_view import SILENT_S
from streamrl.recordings.audit import KINDS
from streamrl.records import Batch, Rollout, Turn

POINTS = 240  # of a curve: more are means of neighbours
BARS = 60  # of the batch composition
PAGE_ROWS = 50
MOST_TOKENS = 32_768  # of a rollout that are sent at a time
PANELS = (  # title, unit, metrics
    ("Loss", "", ("learner/loss", "learner/policy_loss")),
    ("Entropy", "nats", ("learner/entropy",)),
    ("Divergence from the reference", "nats", ("learner/kl",)),
    ("Gradient norm", "", ("learner/grad_norm",)),
    ("Age of what is trained on", "versions", ("batcher/batch_age_mean", "batcher/batch_age_max")),
    ("Learner: a step, and its wait for data", "s", ("learner/step_s", "learner/idle_s")),
    ("Servers: swap of weights, and pause", "s", ("inference/swap_s", "inference/pause_s")),
)
Texts = Callable[[Sequence[int]], list[str]]


# ---- the run at a step ---------------------------------------------------------------------------


def overview(state: State, time_s: float, step: int | None = None) -> dict[str, Any]:
    """Everything but the rollouts, as it was at the end of `step`; default: as it is at `time_s`.
    Of an older step: at the end of its piece.
    """
    asked = step
    step = None if step is None else state.steps.end_of(step)
    newest = state.view.version
    heard_s = max(state.view.heard_s.values(), default=None)
    target = state.run.orchestrator.target
    return {
        "run": state.run.run,
        "envs": state.index.envs,
        "first": state.steps.versions[0] if state.steps.versions else 0,
        "newest": newest,
        "step": newest if asked is None else asked,
        "replay": step is not None,
        "max_steps": state.run.orchestrator.max_steps,
        "heard_s_ago": None if heard_s is None else max(0.0, time_s - heard_s),
        "live": heard_s is not None and time_s - heard_s < SILENT_S,
        "target": {"env": target.env, "reward": target.reward, "batches": target.batches}
        if target
        else None,
        "time_s": state.steps.end_s(step) if step is not None and step < newest else state.time_s,
        "started_s": state.steps.times_s[0] if state.steps.times_s else None,
        "figures": figures(state, step),
        "loop": [loop.jsonable(node) for node in loop_at_step(state, step, time_s)],
        "panels": panels(state, step),
        "composition": composition(state, step),
        "fates": fates(state, step),
        "fate_names": FATES,
    }


def figures(state: State, step: int | None = None) -> dict[str, Any]:
    """The few numbers at the top."""
    by_batch = {env: rewards(state, env) for env in state.index.envs}
    earned = {
        env: [found[at] for at in sorted(found) if step is None or at <= step]
        for env, found in by_batch.items()
        if found
    }
    counts = fates(state, step)
    ages = Counter[int]()
    for number, made in state.made_of.items():
        if step is None or number <= step:
            for (_, age), count in made.items():
                ages[age] += count
    ended = sum(
        count for env in counts for name, count in env["counts"].items() if name != IN_FLIGHT
    )
    return {
        "rewards": {
            env: fmean(values[-REWARD_BATCHES:]) if values else None
            for env, values in earned.items()
        },
        "reward_batches": REWARD_BATCHES,
        "rollouts": published(state, "rollouts", step=step),
        "expired_share": sum(env["counts"]["expired"] for env in counts) / ended if ended else None,
        "age_mean": sum(age * count for age, count in ages.items()) / ages.total()
        if ages
        else None,
        "batched": sum(env["counts"]["batched"] for env in counts),
    }


def fates(state: State, step: int | None = None) -> list[dict[str, Any]]:
    """How the rollouts of each env ended, and how many have not: published = the sum of all."""
    found: list[dict[str, Any]] = []
    for env in state.index.envs:
        counts = {
            kind: ended.until(step) if (ended := state.ended.get((env, kind))) else 0
            for kind in KINDS
        }
        total = published(state, "rollouts", env, step)
        found.append(
            {
                "env": env,
                "published": total,
                "counts": {**counts, IN_FLIGHT: max(0, total - sum(counts.values()))},
            }
        )
    return found


def composition(state: State, step: int | None = None) -> dict[str, Any]:
    """What batches were made of: rollouts by env, and by age in versions. Many batches are put
    together to `BARS` bars.
    """
    numbers = sorted(number for number in state.made_of if step is None or number <= step)
    width = -(-len(numbers) // BARS) or 1
    ages = sorted({age for number in numbers for _, age in state.made_of[number]})
    bars: list[dict[str, Any]] = []
    for start in range(0, len(numbers), width):
        together = numbers[start : start + width]
        made = sum((state.made_of[number] for number in together), Counter[tuple[str, int]]())
        bars.append(
            {
                "first": state.steps.start_of(together[0]),
                "last": together[-1],
                "env": [
                    sum(count for (env, _), count in made.items() if env == name)
                    for name in state.index.envs
                ],
                "age": [sum(count for (_, age), count in made.items() if age == at) for at in ages],
            }
        )
    return {"envs": state.index.envs, "ages": ages, "bars": bars}


def panels(state: State, step: int | None = None) -> list[dict[str, Any]]:
    """Curves over steps; those of which nothing is known are left out."""
    earned = [curve(env, rewards(state, env), step, smooth=True) for env in state.run.envs]
    found = [
        {
            "title": "Reward",
            "unit": f"mean of a batch; line: of {SMOOTH_BATCHES}",
            "series": [made for made in earned if made["points"]],
        }
    ]
    found += [made for name in state.evals if (made := _evaluation(state, name, step))]
    for title, unit, names in PANELS:
        there = [
            (name, source) for name in names for metric, source in state.curves if metric == name
        ]
        several = len({source for _, source in there}) > 1
        drawn = [
            curve(
                _label(name, source if several else "", len(names)),
                state.curves[name, source],
                step,
            )
            for name, source in sorted(there)
        ]
        if drawn := [made for made in drawn if made["points"]]:
            found.append({"title": title, "unit": unit, "series": drawn})
    return found


def curve(
    name: str, values: Mapping[int, float], step: int | None, smooth: bool = False
) -> dict[str, Any]:
    """At most `POINTS` points [step, value], the means of neighbours; `line`: the trailing mean
    over `SMOOTH_BATCHES`, at the same steps.
    """
    steps = sorted(at for at in values if step is None or at <= step)
    raw = np.array([values[at] for at in steps], np.float64)
    made: dict[str, Any] = {"name": name, "points": thinned(steps, raw)}
    if smooth:
        made["line"] = thinned(steps, trailing_mean(raw.tolist(), SMOOTH_BATCHES)) if steps else []
    return made


def thinned(steps: Sequence[int], values: np.ndarray) -> list[list[float | None]]:
    """(n,) steps and float64 values to at most `POINTS` pairs: the last step of each piece, and the
    mean of its finite values.
    """
    width = -(-len(steps) // POINTS) or 1
    found: list[list[float | None]] = []
    for start in range(0, len(steps), width):
        piece = values[start : start + width]
        finite = piece[np.isfinite(piece)]
        found.append(
            [
                steps[min(start + width, len(steps)) - 1],
                _rounded(float(finite.mean())) if len(finite) else None,
            ]
        )
    return found


def _evaluation(state: State, name: str, step: int | None) -> dict[str, Any] | None:
    made = {
        version: evaluation
        for version, evaluation in sorted(state.evals[name].items())
        if step is None or version <= step
    }
    ks = sorted({passed.k for evaluation in made.values() for passed in evaluation.pass_at})
    series = [
        curve(
            f"pass@{k}", {v: p.value for v, e in made.items() for p in e.pass_at if p.k == k}, step
        )
        for k in ks
    ]
    return (
        {"title": f"Evaluation: {name}", "unit": "share of held-out problems", "series": series}
        if series
        else None
    )


def _label(name: str, source: str, of: int) -> str:
    short = name.partition("/")[2].removesuffix("_s").replace("batch_age_", "").replace("_", " ")
    return " · ".join(filter(None, (source, short if of > 1 or not source else "")))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# ---- rollouts ------------------------------------------------------------------------------------


def page(
    state: State,
    query: Query,
    number: int = 0,
    step: int | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> dict[str, Any]:
    """Page `number` of the rollouts that are asked for, and how many there are.

    `lock` keeps others from folding; it is taken for a piece of the index at a time.
    """
    index = state.index
    lock = lock or nullcontext()
    while True:
        with lock:
            forgotten = index.forgotten
            shown = None if step is None else state.steps.end_of(step)
            before_s = np.inf if shown is None else state.steps.end_s(shown)
        found = index.select(query, shown, before_s, lock)
        finite = found.rewards[np.isfinite(found.rewards)]
        with lock:
            if index.forgotten == forgotten:  # else the rows have other numbers now
                return {
                    "total": len(found.rows),
                    "reward_mean": float(finite.mean(dtype=np.float64)) if len(finite) else None,
                    "page": number,
                    "pages": max(1, -(-len(found.rows) // PAGE_ROWS)),
                    "kept": len(index.uids),
                    "forgotten": forgotten,
                    "rows": [
                        row(state, at, shown)
                        for at in found.rows[number * PAGE_ROWS : (number + 1) * PAGE_ROWS].tolist()
                    ],
                }


def row(state: State, at: int, step: int | None = None) -> dict[str, Any]:
    """A rollout by what the index has of it."""
    index = state.index
    step = None if step is None else state.steps.end_of(step)
    found = index.rows[at]
    place = index.place(at)
    met = int(found["ended"]) <= (NEVER - 1 if step is None else step)
    reward = float(found["reward"])
    return {
        **place._asdict(),
        "uid": index.uids[at],
        "group": index.groups[at],
        "time_s": float(found["time_s"]),
        "oldest": int(found["oldest"]),
        "newest": int(found["newest"]),
        "reward": _rounded(reward) if np.isfinite(reward) else None,
        "turns": int(found["turns"]),
        "tokens": int(found["tokens"]),
        "sampled": int(found["sampled"]),
        "truncated": bool(found["truncated"]),
        "fate": FATES[found["fate"]] if met else IN_FLIGHT,
        "batch": int(found["batch"]) if met and found["batch"] >= 0 else None,
    }


def detail(rollout: Rollout, batch: Batch | None, texts: Texts | None) -> dict[str, Any]:
    """A rollout with its tokens: the text of each (`texts`; None: no tokenizer), its logprob, the
    advantage it had in `batch`.
    """
    by_turn = advantages(rollout, batch) if batch else [None] * len(rollout.turns)
    left = MOST_TOKENS
    turns: list[dict[str, Any]] = []
    for turn, values in zip(rollout.turns, by_turn, strict=True):
        turns.append(_turn(turn, values, texts, max(left, 0), rollout))
        left -= len(turns[-1]["ids"])
    return {
        "problem": rollout.problem_id,
        "producer": rollout.producer,
        "temperature": rollout.temperature,
        "rewards": rollout.rewards,
        "failure": rollout.failure,
        "misaligned": rollout.misaligned,
        "metadata": {str(name): _text(value) for name, value in rollout.metadata.items()},
        "turns": turns,
    }


def _turn(
    turn: Turn, values: np.ndarray | None, texts: Texts | None, most: int, rollout: Rollout
) -> dict[str, Any]:
    ids = [] if turn.tokens is None else turn.tokens[:most].tolist()
    how = turn.inference_metadata
    sampled = turn.logprobs is not None
    spans = [[span.version, span.start, span.end] for span in how.version_spans] if how else []
    if sampled and not spans and rollout.policy_version == rollout.newest_policy_version:
        spans = [[rollout.policy_version, 0, 0 if turn.tokens is None else len(turn.tokens)]]
    return {
        "role": turn.role,
        "message": turn.message,
        "ids": ids,
        "omitted": 0 if turn.tokens is None else len(turn.tokens) - len(ids),
        "texts": texts(ids) if texts and ids else None,
        "logprobs": None
        if turn.logprobs is None
        else [_rounded(value) for value in turn.logprobs[:most].tolist()],
        "advantages": None
        if values is None or not sampled
        else [_rounded(value) for value in values[:most].tolist()],
        "spans": spans,
        "reward": turn.reward,
        "rewards": turn.rewards,
        "fork": turn.fork,
        "server": how.server if how else "",
        "finish_reason": how.finish_reason if how else "",
        "latency_s": how.latency_s if how else None,
    }


def advantages(rollout: Rollout, batch: Batch) -> list[np.ndarray | None]:
    """The advantage of each token in the batch: of each turn (n,) float32, or None where the batch
    does not have the rollout as it is.

    A rollout is a sequence, or several where it forked: the prompt, which has none, and the rest,
    cut by `lengths`.
    """
    nothing: list[np.ndarray | None] = [None] * len(rollout.turns)
    sequences = np.flatnonzero([uid == rollout.rollout_uid for uid in batch.uids])
    sizes = [0 if turn.tokens is None else len(turn.tokens) for turn in rollout.turns]
    heads = [0, *(i for i, turn in enumerate(rollout.turns) if i and turn.fork), len(rollout.turns)]
    if len(sequences) != len(heads) - 1:
        return nothing
    starts = np.cumsum(batch.lengths) - batch.lengths
    found = nothing
    for number, sequence in enumerate(sequences.tolist()):
        first = heads[number]
        last = heads[number + 1]
        length = int(batch.lengths[sequence])
        total = sum(sizes[first:last])
        if length > total:
            return [None] * len(rollout.turns)
        values = np.zeros(total, np.float32)
        own = slice(int(starts[sequence]), int(starts[sequence]) + length)
        values[total - length :] = (
            batch.advantages[sequence]
            if batch.token_advantages is None
            else batch.token_advantages[own]
        )
        cuts = np.cumsum(sizes[first:last])[:-1]
        found[first:last] = np.split(values, cuts)
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=repr).decode()
