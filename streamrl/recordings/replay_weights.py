"""`streamrl replay --weights`: the learner again, over the recorded batches, every version compared
with its announcement by hash.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from streamrl.config.run_file import RunFile
from streamrl.learner.inputs import announced_hashes, read_announcements
from streamrl.log.protocol import Log
from streamrl.monitoring.display import quoted
from streamrl.recordings.progress import OnProgress, no_progress, progress_bar


class RecomputedVersion(Protocol):
    """A version that came out, and what its weights would be announced as."""

    @property
    def version(self) -> int: ...

    @property
    def sha256(self) -> str: ...


@dataclass
class WeightComparison:
    identical: int = 0
    earlier: int = 0  # of them: to a lineage that has been replaced since
    difference: str = ""  # the first


def compare_versions(
    announced: Mapping[int, str],
    computed: Iterable[RecomputedVersion],
    progress: OnProgress = no_progress,
    replaced: Mapping[int, Collection[str]] | None = None,
) -> WeightComparison:
    """`announced`: the newest lineage of each version; `replaced`: those before it, which a version
    may come out as, too.

    Ends at the first difference, and at the first version that nobody has announced yet. A version
    that is never reached is a difference too.
    """
    result = WeightComparison()
    last = max(announced, default=-1)
    first = reached = -1
    for now in computed:
        then = announced.get(now.version)
        if then is None:
            break
        if then != now.sha256 and now.sha256 in (replaced or {}).get(now.version, ()):
            result.earlier += 1
        elif then != now.sha256:
            result.difference = f"version {now.version}: announced as {then}, now {now.sha256}"
            return result
        first = now.version if first < 0 else first
        reached = now.version
        result.identical += 1
        progress(reached - first, last - first)
        if reached == last:
            break
    if reached < last:
        result.difference = (
            f"version {reached + 1}: announced as {announced.get(reached + 1, 'nothing')}, but no"
            " recorded batch gives it"
        )
    return result


def show_weights(run: RunFile, log: Log, first: int | None, console: Console) -> int:
    """Train again and say whether every version came out the same. Returns the exit code: 1 at the
    first difference.
    """
    from streamrl.learner.recompute import retrain_all  # JAX

    with progress_bar("replay weights", Console(stderr=True)) as progress:
        announced = announced_hashes(log, run.learner.name)
        replaced = dict[int, set[str]]()
        for record in read_announcements(log, run.learner.name):
            replaced.setdefault(record.version, set()).add(record.sha256)
        result = compare_versions(announced, retrain_all(run, log, first), progress, replaced)
    again = (
        f", {result.earlier:,} of them to a lineage that has been computed differently since"
        if result.earlier
        else ""
    )
    console.print(
        f"learner {run.learner.name}: {result.identical:,} versions identical{again}",
        highlight=False,
    )
    if result.difference:
        console.print(
            quoted("first difference", "bold red") + quoted(f" {result.difference}"), soft_wrap=True
        )
        return 1
    return 0
