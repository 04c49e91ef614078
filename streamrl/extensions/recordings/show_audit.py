"""Prints the result of `streamrl audit`. Progress goes to stderr."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.audit import KINDS, Audit, audit
from streamrl.extensions.recordings.progress import progress_bar
from streamrl.run.monitoring.cells import quoted
from streamrl.stream.log.protocol import Log

COLUMNS = (*KINDS, "in flight", "lost")


def show_audit(run: RunFile, log: Log, by_version: bool, console: Console) -> int:
    """Print the account of a run. Returns the exit code, which is 1 if it does not balance."""
    with progress_bar("audit", Console(stderr=True)) as progress:
        result = audit(log, run, progress)
    console.print(account_table(result, by_version))
    if by_version:
        console.print(provenance_table(result))
    _print_training(result, console)
    sums = " + ".join(f"{result.total(name):,} {name}" for name in COLUMNS if result.total(name))
    console.print(
        f"published {result.published:,} = {sums or 0}: "
        + ("balanced" if result.balanced else "[bold red]does not balance[/]")
    )
    if result.gone:
        console.print(
            f"{result.gone:,} more are gone by retention, which has deleted them or their fates"
        )
    for problem in result.problems:
        console.print(quoted(f"  {problem}", "red"))
    unlisted = result.lost + result.repeated + result.dangling - len(result.problems)
    if unlisted > 0:
        console.print(f"  and {unlisted:,} more", style="red")
    return 0 if result.balanced else 1


def _print_training(result: Audit, console: Console) -> None:
    """Print how many rollouts were trained on, at which age, and how many were wasted."""
    ages = ", ".join(f"{age}: {count:,}" for age, count in sorted(result.ages.items()))
    console.print(
        f"{result.trained:,} of {result.total('batched'):,} batched rollouts are trained on, in"
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
    sampled = sum(tokens.total() for tokens in result.tokens.values())
    totals = {name: result.total_tokens(name) for name in COLUMNS}
    shares = [
        f"{tokens:,} {name} ({tokens / sampled:.1%})" for name, tokens in totals.items() if tokens
    ]
    console.print(f"sampled tokens {sampled:,} = {' + '.join(shares) or 0}")
    console.print(f"wasted (expired): {result.total('expired') / max(result.published, 1):.1%}")


def account_table(result: Audit, by_version: bool) -> Table:
    """The number of rollouts by fate, with a row for each env, or for each env and policy version.

    A fate that no rollout has gets no column.
    """
    rows: dict[tuple[str, ...], Counter[str]] = {}
    for (env, version), counts in sorted(result.counts.items()):
        key = (env, str(version)) if by_version else (env,)
        rows.setdefault(key, Counter()).update(counts)
    labels = ("env", "version") if by_version else ("env",)
    fates = [name for name in COLUMNS if result.total(name)]
    table = Table(*labels, "published", *fates, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, counts in rows.items():
        numbers = (counts.total(), *(counts[name] for name in fates))
        table.add_row(*map(quoted, key), *(f"{number:,}" for number in numbers))
    return table


def provenance_table(result: Audit) -> Table:
    """A table of each batch: the versions that sampled its rollouts, and the one trained on it."""
    trained = {batch: version for version, batch in result.trained_on.items()}
    table = Table(
        "batch", "rollouts", "sampled by version", "gave version", box=None, header_style="bold"
    )
    for batch, versions in sorted(result.sampled_by.items()):
        by = ", ".join(f"{version}: {count:,}" for version, count in sorted(versions.items()))
        table.add_row(str(batch), f"{versions.total():,}", by, str(trained.get(batch, "-")))
    return table
