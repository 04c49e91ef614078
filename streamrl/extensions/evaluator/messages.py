"""The lines that the evaluator logs."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.stream.records import Evaluation

MAX_SHOWN = 5  # A line names at most this many versions.


def deleted_line(versions: Sequence[int]) -> str:
    """Reports that these versions cannot be evaluated any more."""
    shown = ", ".join(str(version) for version in versions[:MAX_SHOWN])
    if len(versions) > MAX_SHOWN:
        shown = f"{shown} and {len(versions) - MAX_SHOWN} more"
    return (
        f"not evaluated, as the weights are deleted: version {shown}; raise weights.keep_versions"
        " or eval.every"
    )


def result_line(evaluation: Evaluation) -> str:
    """Reports what an evaluation has found, and how long it took."""
    shown = ", ".join(
        f"pass@{at.k} {at.value:.3f} [{at.low:.3f}, {at.high:.3f}]" for at in evaluation.pass_at
    )
    return f"version {evaluation.version}, {evaluation.name}: {shown} in {evaluation.seconds:.1f} s"
