"""The learner against Levanter alone: the same model, batches and loss, some steps of one and the
same steps of the other in turns.

    python -m bench.learner [--pairs 200] [--shape 4x128x8x512] [--model DIRECTORY] ...

bench/README.md says how and why; the figures go to bench/results/learner.json. The exit code is 1
when the learner trains fewer than `LEAST` times as many tokens in a second as Levanter alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.measure import RESULTS, quantile, spread, write
from bench.plain_levanter import Plain, Rows, Settings
from bench.work import joined_group
from streamrl.batcher.assemble import assemble
from streamrl.config.run_file import RunFile, parse
from streamrl.learner.inputs import TrainingInput, follow, take_until_stopped
from streamrl.learner.loss.normalization import token_mean
from streamrl.learner.model import model
from streamrl.learner.model.examples import RlExample, expand
from streamrl.learner.publisher import VersionPublisher
from streamrl.learner.trainer import open_trainer
from streamrl.learner.update import normalize_advantages
from streamrl.stream.local_kafka import broker
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.meter import METRICS, Meter
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.log.records_of import records_of
from streamrl.stream.records import Batch, JoinedGroup, Metric

LEAST = 0.9  # of the tokens/s of Levanter alone
# rollouts a problem, tokens
GROUP = 8
PROMPT = 24
SHAPES = ("4x128x8x512", "4x128x8x256")  # the first one is what the goal is for
# steps of one, then of the other: a version is announced beside the next step, which is to be the
# learner's own. The first turn is not counted. Each turn of the learner has a checkpoint
TURN = 10
LABELS = {
    "levanter_s": "Levanter alone",
    "learner_s": "learner, all of it",
    "step_s": "  to the step's end",
    "publish_s": "  standing still for a version",
    "publish_wait_s": "    of it, for the one before",
    "probe_s": "    probe",
    "checkpoint_s": "    checkpoint, one in ten",
    "export_s": "  beside the next: export",
    "hash_s": "    hash",
    "announce_s": "    announce",
}
WHOLE = ("levanter_s", "learner_s")
BESIDE = (
    "publish_s",
    "publish_wait_s",
    "probe_s",
    "checkpoint_s",
    "export_s",
    "hash_s",
    "announce_s",
)


def run_file(
    directory: Path, rows: int, row: int, tiny: Sequence[int] = (), model: str = ""
) -> RunFile:
    """A run whose learner is measured. No reference: Levanter alone has none. `tiny`: layers and
    width of the tiny model, where there is no directory of a `model`.
    """
    if model:
        shape = {"path": str(Path(model).absolute())}
    else:
        layers, hidden = tiny
        shape = {"tiny": {"layers": layers, "hidden": hidden}}
    return parse(
        {
            "run": "learner",
            "runs_dir": str(directory),
            "envs": {"copy-digits": {}},
            "batcher": {"total_token_budget": rows * row, "row_count": rows, "max_seq_len": row},
            "model": {"max_seq_len": row, **shape},
            "learner": {
                "kl": None,
                "checkpoint_every": TURN,
                # As Levanter alone computes.
                "precision": "float32",
                "remat": "none",
                "logprob_chunk": 0,
            },
        }
    )


def a_batch(run: RunFile, number: int) -> Batch:
    """As full as whole groups make it. Some of the advantages are positive, some negative, and the
    sampled logprobs are near those of the policy.
    """
    random = np.random.default_rng(number)
    rows = run.batcher.rows
    row = run.batcher.max_seq_len
    longest = row - PROMPT
    groups = list[JoinedGroup]()
    made = None
    while True:
        groups.append(
            a_group(
                f"{number}-{len(groups)}",
                random.integers(longest // 8, longest // 3, GROUP).astype(np.int32),
                random,
                number,
            )
        )
        larger = assemble(groups, number, number, rows, row)
        if larger is None:
            assert made is not None, "a group fits into the rows"
            return made
        made = larger


def a_group(
    name: str, lengths: np.ndarray, random: np.random.Generator, version: int
) -> JoinedGroup:
    n = len(lengths)
    total = int(lengths.sum())
    prompt, tokens = (random.integers(4, 16, size).astype(np.uint16) for size in (PROMPT, total))
    logprobs = random.normal(-2.8, 0.1, total).astype(np.float32)
    advantages = random.normal(0, 1, n).astype(np.float32)
    return joined_group(
        name,
        lengths,
        prompt,
        tokens,
        version,
        environment="copy-digits",
        policy_logprobs=logprobs,
        advantages=advantages,
    )


def rows_of(example: RlExample) -> Rows:
    """The same batch for Levanter alone, made beforehand: it trains from memory."""
    example = normalize_advantages(example)
    weights = token_mean(example.loss_mask, example.segment_ids)
    return Rows(
        example.input_ids,
        example.segment_ids,
        example.position_ids,
        example.policy_logprobs,
        example.advantages * weights,
    )


def measure(run: RunFile, log: Log, pairs: int, turn: int = TURN) -> dict[str, Any]:
    """`pairs` steps of each, in turns of `turn`; who is first changes with every turn. The batches
    lie in the log, and in memory, before it begins.

    A turn of the learner begins with nothing under way and ends when its last version is announced,
    so nothing of it falls into a turn of the other.
    """
    batches = [a_batch(run, number) for number in range(pairs + turn)]
    feeder = log.writer("bench")
    for batch in batches:
        feeder.commit([to_message(Output("batches", str(batch.number), batch))])
    c = run.learner
    plain = Plain(
        run.batcher.rows,
        Settings(
            c.learning_rate, c.warmup_steps, c.beta1, c.beta2, c.weight_decay, c.max_grad_norm
        ),
    )
    identity = f"learner-{c.name}"
    alone = list[float]()
    ours = list[float]()
    losses = list[float]()
    meter = Meter(log, identity)
    with (
        open_trainer(run) as policy,
        VersionPublisher(
            c.name, policy, {}, log.writer(identity, "policy-versions"), meter
        ) as publisher,
    ):
        publisher.publish(None)
        publisher.wait()
        coming = publisher.until_failure(until_done(log))
        with plain.training():
            plain.begin(model.load(policy.initial_model_dir, run.model.max_seq_len))
        for first in range(0, len(batches), turn):
            turns = [
                (ours, partial(steps_of_ours, publisher, coming)),
                (alone, partial(steps_alone, plain, losses)),
            ]
            for seconds, steps in turns if first // turn % 2 else reversed(turns):
                seconds += steps(batches[first : first + turn])
        first_model = model.load(policy.initial_model_dir, run.model.max_seq_len)
        apart = off_max(policy.state.model, plain.state.model)
        moved = off_max(policy.state.model, first_model)
    said = [metric.values for metric in measured(log, identity)]
    times = {
        "levanter_s": alone,
        "learner_s": ours,
        **{name: [values[f"learner/{name}"] for values in said] for name in BESIDE},
    }
    times["step_s"] = [whole - stood for whole, stood in zip(ours, times["publish_s"], strict=True)]
    off = max(abs(values["learner/loss"] - loss) for values, loss in zip(said, losses, strict=True))
    counted = {name: seconds[turn:] for name, seconds in times.items()}
    tokens = float(np.median([real_tokens(batch) for batch in batches]))
    return {
        "rows": run.batcher.rows,
        "max_seq_len": run.batcher.max_seq_len,
        "model": name_of(run),
        "pairs": pairs,
        "turn": turn,
        "tokens_per_batch": tokens,
        "tokens_per_s": {
            name: tokens / quantile(counted[key], 0.5)
            for name, key in (("learner", "learner_s"), ("levanter", "levanter_s"))
        },
        "ms": {
            name: {
                **{k: 1000 * v for k, v in spread(seconds).items()},
                "mean": 1000 * statistics.fmean(seconds),
            }
            for name, seconds in counted.items()
        },
        "ratio": spread(against(counted, "learner_s")),
        "ratio_of_turns": spread(
            against({name: by_turns(counted[name], turn) for name in WHOLE}, "learner_s")
        ),
        "ratio_of_the_step": spread(against(counted, "step_s")),
        "loss_off_max": off,
        "weights_off_max": apart,
        "weights_moved_max": moved,
    }


def steps_of_ours(
    publisher: VersionPublisher, coming: Iterator[TrainingInput], batches: Sequence[Batch]
) -> list[float]:
    """Seconds of each step. What runs after the last of them belongs to all of them alike."""
    seconds = list[float]()
    for _ in batches:
        started = time.perf_counter()
        publisher.train(next(coming), 0.0)
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    publisher.wait()
    rest = (time.perf_counter() - started) / len(seconds)
    return [own + rest for own in seconds]


def steps_alone(plain: Plain, losses: list[float], batches: Sequence[Batch]) -> list[float]:
    """The same of Levanter alone."""
    rows = [rows_of(expand(batch)) for batch in batches]
    seconds = list[float]()
    with plain.training():
        for each in rows:
            started = time.perf_counter()
            losses.append(plain.step(each))
            seconds.append(time.perf_counter() - started)
    return seconds


def by_turns(seconds: Sequence[float], turn: int) -> list[float]:
    """The sums of `turn` steps each."""
    return [sum(seconds[first : first + turn]) for first in range(0, len(seconds), turn)]


def against(times: Mapping[str, Sequence[float]], ours: str) -> list[float]:
    """Of each pair, of steps or of turns: how much of the time of `ours` Levanter alone takes."""
    return [alone / own for alone, own in zip(times["levanter_s"], times[ours], strict=True)]


def measured(log: Log, source: str) -> list[Metric]:
    """What the learner has said of each step."""
    published = [
        metric
        for metric, _ in records_of(log, METRICS, Metric)
        if metric.source == source and metric.step is not None
    ]
    return sorted(published, key=lambda metric: metric.step or 0)


def off_max(one: Any, other: Any) -> float:
    """How far two models are apart."""
    return max(
        float(abs(a - b).max())
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def name_of(run: RunFile) -> str:
    """The model that is trained: the name of its directory, or the tiny one's layers and width."""
    tiny = run.model.tiny
    return Path(run.model.path).name if run.model.path else f"{tiny.layers} x {tiny.hidden}"


def until_done(log: Log) -> Iterator[TrainingInput]:
    """What there is to train on, as a learner reads it."""
    return take_until_stopped(
        threading.Event(), follow(log, needs_scores=False, offset=0, scores_offset=0)
    )


def real_tokens(batch: Batch) -> int:
    return int(batch.sequence_lengths.sum())


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(
        "",
        *(f"{r['model']}, {r['rows']} x {r['max_seq_len']}" for r in results),
        box=None,
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, label in (("learner", "learner, tokens/s"), ("levanter", "Levanter alone, tokens/s")):
        shown.add_row(label, *(f"{r['tokens_per_s'][name]:,.0f}" for r in results))
    shown.add_row("ratio, median of pairs", *(f"{r['ratio']['median']:.3f}" for r in results))
    shown.add_row(
        "  of turns, with their checkpoints",
        *(f"{r['ratio_of_turns']['median']:.3f}" for r in results),
    )
    shown.add_row(
        "  of the step alone", *(f"{r['ratio_of_the_step']['median']:.3f}" for r in results)
    )
    for name, label in LABELS.items():
        shown.add_row(
            f"{label}, ms",
            *(f"{r['ms'][name]['mean']:.1f}" if name in r["ms"] else "" for r in results),
        )
    shown.add_row("losses differ by at most", *(f"{r['loss_off_max']:.1g}" for r in results))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument(
        "--shape",
        action="append",
        metavar="LAYERSxHIDDENxROWSxROW",
        help="of model and batch, with --model ROWSxROW; may be repeated: a column each",
    )
    parser.add_argument("--model", default="", metavar="DIRECTORY", help="instead of a tiny one")
    parser.add_argument("--out", type=Path, default=RESULTS / "learner.json")
    given = parser.parse_args()
    results = list[dict[str, Any]]()
    for shape in given.shape or SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            *tiny, rows, row = (int(size) for size in shape.split("x"))
            run = run_file(Path(directory), rows, row, tiny, given.model)
            kafka = broker.start(Path(directory) / "kafka")
            try:
                address = {"bootstrap.servers": kafka.address}
                topic_changes.apply(run, address)
                results.append(measure(run, KafkaLog(address, run.run), given.pairs))
            finally:
                kafka.stop()
    write(given.out, {"shapes": results})
    Console().print(table(results))
    if (found := results[0]["ratio_of_turns"]["median"]) < LEAST:
        raise SystemExit(
            f"bench: the learner trains {found:.2f} times as many tokens/s as Levanter alone;"
            f" expected {LEAST}"
        )


if __name__ == "__main__":
    main()
