"""`streamrl replay --weights`: trains again on the recorded batches, and compares the hash of every
version with the announced one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.progress import OnProgress, no_progress, progress_bar
from streamrl.run.monitoring.cells import quoted
from streamrl.stream.log.protocol import Log
from streamrl.weights.announcements import announced_hashes, read_announcements


class RecomputedVersion(Protocol):
    """A version that was trained again, and the hash of its weights."""

    @property
    def version(self) -> int: ...

    @property
    def sha256(self) -> str: ...


@dataclass
class WeightComparison:
    """The number of versions that came out as announced, up to the first difference."""

    identical: int = 0
    earlier: int = 0  # those of them that are identical to a lineage that was replaced later
    difference: str = ""  # the first difference, in words


def compare_versions(
    announced: Mapping[int, str],
    computed: Iterable[RecomputedVersion],
    progress: OnProgress = no_progress,
    replaced: Mapping[int, Collection[str]] | None = None,
) -> WeightComparison:
    """Compare versions that were computed again with the announced ones, by hash.

    `announced` has the hash of the newest lineage of each version. `replaced` has the hashes of all
    its lineages, which are right too. The comparison ends at the first difference, or at the first
    version that is not announced. An announced version that is not reached is a difference.
    """
    result = WeightComparison()
    last = max(announced, default=-1)
    first = -1
    reached = -1
    for now in computed:
        then = announced.get(now.version)
        if then is None:
            break
        if then != now.sha256:
            if now.sha256 not in (replaced or {}).get(now.version, ()):
                result.difference = f"version {now.version}: announced as {then}, now {now.sha256}"
                return result
            result.earlier += 1
        if first < 0:
            first = now.version
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
    """Train again and print whether every version came out the same.

    Training begins with the checkpoint of version `first`, or with the run's first version. Returns
    the exit code, which is 1 if there is a difference.
    """
    from streamrl.learner.recompute import retrain_all  # This imports JAX, which takes seconds.

    with progress_bar("replay weights", Console(stderr=True)) as progress:
        announced = announced_hashes(log, run.learner.name)
        replaced = dict[int, set[str]]()
        for record in read_announcements(log, run.learner.name):
            replaced.setdefault(record.version, set()).add(record.sha256)
        result = compare_versions(announced, retrain_all(run, log, first), progress, replaced)
    line = f"learner {run.learner.name}: {result.identical:,} versions identical"
    if result.earlier:
        line += (
            f", {result.earlier:,} of them to a lineage that has been computed differently since"
        )
    console.print(line, highlight=False)
    if result.difference:
        console.print(
            quoted("first difference", "bold red") + quoted(f" {result.difference}"), soft_wrap=True
        )
        return 1
    return 0
