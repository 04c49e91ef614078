"""What a run on a cluster came to: a row for each fault, then what the topics show of all."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from rich.table import Table

from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.learner.inputs import read_batches
from streamrl.stream.log.protocol import Log
from tests.chaos_cluster.harness import CONTROL, MARGIN_S, WRITERS, Row
from tests.chaos_cluster.known import ANSWER_S, TALK, TURNS


@dataclass
class Outcome:
    """What the topics of a run show that has come to rest."""

    rollouts: int
    batches: int
    lost: int  # rollouts without a fate that no part holds
    doubled: int  # rollouts with two fates, or trained on twice
    balanced: bool
    differences: list[str] = field(default_factory=list[str])  # of the replay
    # answers in the batches before each one and in it
    trained: list[int] = field(default_factory=list[int], repr=False)

    @property
    def passed(self) -> bool:
        return (
            self.balanced
            and self.batches > 0
            and not (self.lost or self.doubled or self.differences)
        )


def outcome(log: Log, run: RunFile) -> Outcome:
    trained = Counter[str]()
    answers: list[int] = []
    for batch, _ in read_batches(log):
        trained.update(batch.uids)
        envs = [batch.environments[batch.group_environments[group]] for group in batch.groups]
        answers.append(sum(TURNS if env == TALK else 1 for env in envs))
    account = audit(log, run)
    results = [replay(log, part)[0] for part in processors_of(run).values()]
    return Outcome(
        rollouts=account.published,
        batches=len(answers),
        lost=account.lost,
        doubled=account.repeated + sum(count - 1 for count in trained.values()),
        balanced=account.balanced,
        differences=[str(result.difference) for result in results if result.difference],
        trained=list(accumulate(answers)),
    )


def kept_s(row: Row, found: Outcome) -> float:
    """The time of sampling that was in the log or under way when the fault came, was not trained on
    yet, and was not lost.
    """
    trained = found.trained[row.version - 1] if row.version > 0 else 0
    return (row.answers - trained - row.sampled_again) * ANSWER_S


def misses(rows: list[Row], found: Outcome) -> list[str]:
    """What is not as it should be, a line each. A part that is killed starts again, and an env then
    samples its answers in the making again; a plain producer does neither.
    """
    lines: list[str] = []
    for row in rows:
        if row.part:
            continue
        if row.excess_s > MARGIN_S:
            lines.append(f"{row.fault}: {row.excess_s:.1f} s longer than a plain producer")
        if row.ends and row.fault.startswith("rolling"):
            lines.append(f"{row.fault}: {', '.join(row.ends)}")
        if row.sampled_again:
            lines.append(f"{row.fault}: {row.sampled_again} answers were sampled again")
    if not found.passed:
        lines.append(f"the topics: {found}")
    return lines


def as_json(rows: list[Row], found: Outcome) -> dict[str, Any]:
    return {
        "rows": [{**asdict(row), "kept_s": kept_s(row, found)} for row in rows],
        "kills": sum(row.kills for row in rows),
        **asdict(found),
        "misses": misses(rows, found),
    }


def table(rows: list[Row], found: Outcome) -> Table:
    """Gaps are the longest without a commit, in seconds, and what was lost and kept is seconds of
    sampling.
    """
    made = Table(box=None, header_style="bold", title_justify="left")
    for name in ("fault", *WRITERS, CONTROL, "in sync", "cores", "ended", "lost", "kept"):
        made.add_column(name, justify="left" if name in ("fault", "ended") else "right")
    for row in rows:
        gaps = [f"{row.gaps_s[name]:.1f}" for name in (*WRITERS, CONTROL)]
        ends = ", ".join(row.ends) or "0"
        lost = f"{row.sampled_again * ANSWER_S:.1f}"
        kept = f"{kept_s(row, found):.0f}"
        others = (f"{row.in_sync_s:.0f}", f"{row.cores:.2f}", ends, lost, kept)
        made.add_row(row.fault, *gaps, *others)
    return made
