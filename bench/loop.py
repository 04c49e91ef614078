"""A live run of the quickstart's size: where the time of learner and server goes, by cause, and
what it gains to let them overlap.

    python -m bench.loop [--steps 120] [--rounds 2] [--free] ...
    python -m bench.loop --table       what was measured last, as Markdown

The same run in turns: as its file says, and one thing at a time (`lookahead: 0`, nothing begun for
a batch before the version that it trains). `--free`: without the limit of the second env.
bench/README.md says how and why; the figures go to bench/results/loop.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import RESULTS, markdown, quantile, spread, write
from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.config.topology import FATES, METRICS, POLICY_VERSIONS
from streamrl.run.monitoring.time_account import LEARNER_CAUSES, SERVER_CAUSES, TimeAccount, shares
from streamrl.stream.local_kafka import broker, connect
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.records_of import records_of
from streamrl.stream.records import Fate, Metric, PolicyVersion

Run = dict[str, Any]
ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "deploy" / "runs" / "quickstart.yaml"
COMMON = ["orchestrator.target=null", "inference.heartbeat_s=0.2", "learner.checkpoint_every=50"]
OVERLAPPED = "overlapped"
ONE_AT_A_TIME = "one at a time"
LOOPS = {
    OVERLAPPED: list[str](),
    ONE_AT_A_TIME: ["batcher.lookahead=0", "batcher.admission=capacity", "buffer.max_age=0"],
}
SKIPPED = 20  # steps: compilation, and the first of everything
LIMIT_S = 270.0


class Heard(NamedTuple):
    """What the log has of a run that the figures are made of."""

    metrics: list[Metric]
    versions: dict[int, float]  # when each was announced
    fates: dict[str, int]  # sampled tokens by their end


def gathered(log: Log) -> Heard:
    metrics = [metric for metric, _ in records_of(log, METRICS, Metric)]
    versions = {v.version: v.time_s for v, _ in records_of(log, POLICY_VERSIONS, PolicyVersion)}
    heard = Heard(metrics, versions, {})
    for fate, _ in records_of(log, FATES, Fate):
        sampled = 0 if fate.tokens is None else int(fate.tokens.sum())
        heard.fates[fate.fate] = heard.fates.get(fate.fate, 0) + sampled
    return heard


def figures(heard: Heard, skipped: int, lookahead: int) -> dict[str, Any]:
    """Steps/s, and the share of each cause in the time of learner and server, over the steps after
    the first `skipped`.
    """
    steps = {
        metric.step: metric
        for metric in heard.metrics
        if metric.step is not None and "learner/step_s" in metric.values
    }
    numbers = sorted(number for number in steps if number > skipped and number - 1 in steps)
    if not numbers:
        raise SystemExit(
            f"bench: the run ended after step {max(steps, default=0)}, and the first {skipped}"
            f" steps are not counted; a machine of its own makes more in {LIMIT_S:.0f} s"
        )
    began_s = steps[numbers[0] - 1].time_s
    total_s = steps[numbers[-1]].time_s - began_s
    account = TimeAccount(steps[numbers[0]].source, lookahead)
    for version, time_s in heard.versions.items():
        account.add_version(version, time_s)
    for metric in heard.metrics:
        if metric.time_s >= began_s:
            account.add_metric(metric)
    account.finish()
    swaps = [
        metric.values["inference/swap_s"]
        for metric in heard.metrics
        if "inference/swap_s" in metric.values
    ]
    measured = [steps[number].values for number in numbers]
    return {
        "steps": len(numbers),
        "steps_per_s": len(numbers) / total_s,
        "learner": shares(account.learner_s),
        "server": shares(next(iter(account.servers_s.values()))),
        "step_s": quantile([values["learner/step_s"] for values in measured], 0.5),
        "swap_s": quantile(swaps, 0.5),
        "batch_age_mean": statistics.mean(values["learner/batch_age_mean"] for values in measured),
        "expired_frac": heard.fates.get("expired", 0) / max(sum(heard.fates.values()), 1),
    }


def run_one(name: str, overrides: Sequence[str], steps: int) -> Run:
    """A whole run as a user starts it; then what its log says."""
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
        run = run_file.load(
            QUICKSTART,
            [
                *COMMON,
                *overrides,
                f"orchestrator.max_steps={steps}",
                f"orchestrator.max_wall_s={LIMIT_S}",
            ],
        )
        run = RunFile.model_validate({**run.model_dump(), "runs_dir": directory})
        path = Path(directory) / "run.json"
        path.write_text(run.to_json())
        ended = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "up", str(path)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise SystemExit(
                f"bench: the run ended with {ended.returncode}:"
                f" {(ended.stdout + ended.stderr)[-2000:]}"
            )
        with broker.ensure_running(connect.broker_dir(run)) as address:
            return {
                "name": name,
                **figures(
                    gathered(KafkaLog({"bootstrap.servers": address}, run.run)),
                    SKIPPED,
                    run.batcher.lookahead,
                ),
            }


def means(runs: Sequence[Run]) -> Run:
    """One column of several runs alike: the mean of each figure, so that shares still add up."""

    def mean(values: Sequence[Any]) -> Any:
        match values[0]:
            case dict():
                return {key: mean([value[key] for value in values]) for key in values[0]}
            case str():
                return values[0]
            case _:
                return statistics.mean(values)

    return mean(runs)


def gains(runs: Sequence[Run], one: str, other: str) -> dict[str, float]:
    """Steps/s of one to that of the other, by round."""
    pairs = zip(
        (run for run in runs if run["name"] == one),
        (run for run in runs if run["name"] == other),
        strict=True,
    )
    return spread([mine["steps_per_s"] / theirs["steps_per_s"] for mine, theirs in pairs])


def table(runs: Sequence[Run]) -> str:
    shown = [
        means([run for run in runs if run["name"] == name])
        for name in dict.fromkeys(run["name"] for run in runs)
    ]
    rows = [
        ("steps/s", *(f"{r['steps_per_s']:.2f}" for r in shown)),
        (
            "a step, a swap, ms",
            *(f"{1000 * r['step_s']:.0f}, {1000 * r['swap_s']:.0f}" for r in shown),
        ),
        ("age of a batch, versions", *(f"{r['batch_age_mean']:.2f}" for r in shown)),
        ("rollouts that expired", *(f"{r['expired_frac']:.1%}" for r in shown)),
    ]
    for part, labels in LABELS.items():
        rows += [
            (f"{part}: {label}", *(f"{r[part][cause]:.1%}" for r in shown))
            for cause, label in labels.items()
        ]
    return markdown(("", *(r["name"] for r in shown)), rows)


LABELS = {"learner": LEARNER_CAUSES, "server": SERVER_CAUSES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="of each run; the first 20 are not counted"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of each, in turns")
    parser.add_argument(
        "--free", action="store_true", help="and without max_groups_per_s of add-digits"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "loop.json")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    given = parser.parse_args()
    loops = dict(LOOPS)
    if given.free:
        loops |= {
            f"{name}, no limit": [*overrides, "envs.add-digits.max_groups_per_s=0"]
            for name, overrides in LOOPS.items()
        }
    runs: list[Run] = json.loads(given.out.read_text())["runs"] if given.table else []
    options = f"--steps {given.steps} --rounds {given.rounds}" + " --free" * given.free
    for number in range(0 if given.table else given.rounds):
        for name, overrides in loops.items():
            print(f"round {number + 1} of {given.rounds}, {name}: {given.steps} steps", flush=True)
            runs.append(run_one(name, overrides, given.steps))
            print(f"  {runs[-1]['steps_per_s']:.2f} steps/s", flush=True)
            # The figures of these runs stay if the next one fails.
            write(given.out, {"runs": runs, "command": f"python -m bench.loop {options}"})
    print(f"\n{table(runs)}\n")
    names = list(dict.fromkeys(run["name"] for run in runs))
    for one, other in zip(names[::2], names[1::2], strict=True):
        gain = gains(runs, one, other)
        print(
            f"steps/s, {one} to {other}: {gain['median']:.2f} ({gain['min']:.2f} to"
            f" {gain['max']:.2f})"
        )


if __name__ == "__main__":
    main()
