"""What `streamrl audit`, `replay`, `export` and `import` print. Progress goes to stderr."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrl.assembler import process as assembler
from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config.run_file import RunFile
from streamrl.errors import ConfigError
from streamrl.log.protocol import Log
from streamrl.monitoring.display import quoted
from streamrl.processor.definition import Processor
from streamrl.recordings.audit import KINDS, Audit, audit
from streamrl.recordings.progress import progress_bar
from streamrl.recordings.replay import ReplayResult, replay

COLUMNS = (*KINDS, "in flight", "lost")


def parts_of(run: RunFile) -> dict[str, Processor[Any, Any]]:
    """The parts whose journals are the schedule of a run."""
    assemblers = [assembler.part(run)] if run.session_envs else []
    return {part.name: part for part in (*assemblers, *buffer.shards(run), batcher.part(run))}


def show_audit(run: RunFile, log: Log, by_version: bool, console: Console) -> int:
    """Print the account_table of a run. Returns the exit code: 1 when it does not balance."""
    with progress_bar("audit", Console(stderr=True)) as progress:
        result = audit(
            log, list(run.envs), run.learner.name, list(parts_of(run).values()), progress
        )
    console.print(account_table(result, by_version))
    if by_version:
        console.print(provenance_table(result))
    batched = result.total("batched")
    published = result.published
    ages = ", ".join(f"{age}: {count:,}" for age, count in sorted(result.ages.items()))
    console.print(
        f"{result.trained:,} of {batched:,} batched rollouts are trained on, in"
        f" {len(result.trained_on)} versions; age at training {ages or '-'}"
    )
    if result.lineages:
        console.print(
            f"{result.lineages:,} times a version was computed again with another result, and"
            " announced as a new lineage"
        )
    if result.skipped:
        console.print(
            f"{result.skipped:,} versions have the weights of the one before: nothing could be"
            " trained on their batch"
        )
    console.print(f"wasted (expired): {result.total('expired') / max(published, 1):.1%}")
    sums = " + ".join(f"{result.total(name):,} {name}" for name in COLUMNS if result.total(name))
    console.print(
        f"published {published:,} = {sums or 0}: "
        + ("balanced" if result.balanced else "[bold red]does not balance[/]")
    )
    if result.gone:
        console.print(
            f"{result.gone:,} more are gone by retention, which has deleted them or their fates"
        )
    for problem in result.problems:
        console.print(quoted(f"  {problem}", "red"))
    if (more := result.lost + result.repeated + result.dangling - len(result.problems)) > 0:
        console.print(f"  and {more:,} more", style="red")
    return 0 if result.balanced else 1


def account_table(result: Audit, by_version: bool) -> Table:
    """Rows by env, or by env and policy version; fates that nowhere occur are left out."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for (env, version), counts in sorted(result.counts.items()):
        rows.setdefault((env, str(version) if by_version else ""), Counter()).update(counts)
    progress_bar = [name for name in COLUMNS if result.total(name)]
    table = Table(
        "env",
        *(["version"] if by_version else []),
        "published",
        *progress_bar,
        box=None,
        header_style="bold",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for (env, version), counts in rows.items():
        table.add_row(
            quoted(env),
            *([version] if by_version else []),
            f"{counts.total():,}",
            *(f"{counts[name]:,}" for name in progress_bar),
        )
    return table


def provenance_table(result: Audit) -> Table:
    """A row for each batch: which versions sampled its rollouts, and which one was trained on it."""
    trained = {batch: version for version, batch in result.trained_on.items()}
    table = Table(
        "batch", "rollouts", "sampled by version", "gave version", box=None, header_style="bold"
    )
    for batch, versions in sorted(result.sampled_by.items()):
        by = ", ".join(f"{version}: {count:,}" for version, count in sorted(versions.items()))
        table.add_row(str(batch), f"{versions.total():,}", by, str(trained.get(batch, "-")))
    return table


def show_replay(
    run: RunFile, log: Log, only: str | None, step: int | None, console: Console
) -> int:
    """Fold the journals again and say whether everything came out the same. Returns the exit code:
    1 at the first difference.
    """
    parts = parts_of(run)
    if only is not None and only not in parts:
        raise ConfigError(
            f"--part {only}: there is no such part; {' and '.join(parts)} have journals"
        )
    identical: Counter[str] = Counter()
    for name in [only] if only else list(parts):
        stop = (
            (lambda fold: fold.state.next_batch > step)
            if step is not None and name == "batcher"
            else (lambda fold: step is not None and fold.state.version >= step)
        )
        result: ReplayResult
        with progress_bar(f"replay {name}", Console(stderr=True)) as progress:
            result, fold = replay(log, parts[name], stop, progress)
        identical.update(result.identical)
        since = (
            f" from entry {result.begins_at:,} on, as retention has deleted what came before"
            if result.begins_at
            else ""
        )
        console.print(
            f"{name}: {result.entries:,} journal entries, {result.events:,} records{since}",
            highlight=False,
        )
        if result.strays:
            console.print(
                f"{result.strays:,} records lie among its outputs that {name} did not write",
                highlight=False,
            )
        if result.difference:
            console.print(quoted("first difference", "bold red") + quoted(f" {result.difference}"))
            return 1
        if step is not None:
            console.print(f"[bold]{name} at step {step}[/]")
            console.print(fold.state)
    console.print(
        f"{identical['groups']:,} groups, {identical['batches']:,} batches identical",
        highlight=False,
    )
    return 0
