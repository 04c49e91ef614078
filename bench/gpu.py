"""What a GPU makes of the kernels of attention, of the learner and of a run, a line a measurement.

    python -m bench.gpu kernels
    python -m bench.gpu learner FILE      # of python -m bench.learner --out FILE
    python -m bench.gpu run DIRECTORY     # of a run that has ended

deploy/gpu/acceptance.sh puts the lines into one table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from streamrl.learner.model import attention
from streamrl.learner.model.attention import Heads
from streamrl.run.orchestrator.preview import parameter_count
from streamrl.system.errors import describe_error

HEADS = Heads(kv_heads=8, queries=2, head_size=128, dtype="bfloat16", scale=128**-0.5)
TOKENS = 8_192  # of the row that is timed
SEGMENTS = 8  # that it has
REPEATS = 10
COMPILING = 3  # first steps of a run, which compile
PEAK_TFLOPS = 989.0  # of an H100 in bfloat16


def kernels(tokens: int = TOKENS) -> Iterator[str]:
    """A line for each kernel: the time of a row's values and gradients, how far it is from the
    reference, and whether segments see each other.
    """
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    narrow = (1, tokens, HEADS.kv_heads, HEADS.head_size)
    wide = (*narrow[:3], HEADS.queries, HEADS.head_size)
    row = [
        jax.random.normal(key, shape).astype(HEADS.dtype)
        for key, shape in zip(keys, (wide, narrow, narrow), strict=True)
    ]
    segments = jnp.asarray(np.arange(tokens)[None] // -(-tokens // SEGMENTS) + 1, jnp.int32)
    for name, kernel in attention.KERNELS.items():
        try:
            difference, seen = attention.compare(kernel, HEADS)
            program = attention.traced(kernel, HEADS, tokens).lower().compile()
            jax.block_until_ready(program(*row, segments))
            began = time.perf_counter()
            for _ in range(REPEATS):
                jax.block_until_ready(program(*row, segments))
            took_ms = 1000 * (time.perf_counter() - began) / REPEATS
        except Exception as error:  # a kernel that this device does not support
            yield f"attention {name}\tcannot be computed: {describe_error(error, 80)}"
            continue
        apart = "segments apart" if seen == 0 else f"SEGMENTS SEE EACH OTHER by {seen:.2g}"
        yield f"attention {name}\t{took_ms:.1f} ms a row, off by {difference:.2g}, {apart}"


def learner(path: Path) -> Iterator[str]:
    """The learner's rate against that of Levanter alone."""
    for shape in json.loads(path.read_text())["shapes"]:
        rates = shape["tokens_per_s"]
        size = shape["model"]
        yield f"learner, {size}\t{rates['learner']:,.0f} tokens/s"
        yield f"Levanter alone, {size}\t{rates['levanter']:,.0f} tokens/s"
        yield f"ratio\t{shape['ratio_of_turns']['median']:.3f}"


def run(directory: Path, peak_tflops: float) -> Iterator[str]:
    """The steps of a run after those that compile: rate, MFU without attention's part, how long a
    server stood still for new weights, and what it passes of held-out problems.
    """
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if "learner/step_s" in line["values"]]
    measured = steps[COMPILING:]
    name = directory.name
    yield f"{name}: steps\t{len(steps)}"
    if measured:
        rate = statistics.median(step["learner/tokens_per_s"] for step in measured)
        yield f"{name}: within a step\t{rate:,.0f} tokens/s"
        model = Path(yaml.safe_load((directory / "run.yaml").read_text())["model"]["path"])
        if (model / "config.json").is_file():
            parameters = parameter_count(json.loads((model / "config.json").read_text()))
            mfu = 6 * parameters * rate / (peak_tflops * 1e12)
            yield f"{name}: MFU, 6 FLOPs a parameter\t{mfu:.1%} of {peak_tflops:g} TFLOPS"
    swaps = [
        line["values"]["inference/swap_s"] for line in lines if "inference/swap_s" in line["values"]
    ]
    if swaps:
        yield f"{name}: a swap's pause\t{1000 * statistics.median(swaps):.0f} ms"
    apart = [
        line["values"]["inference/mismatch_mean_abs"]
        for line in lines
        if "inference/mismatch_mean_abs" in line["values"]
    ]
    if apart:
        yield f"{name}: server and learner apart\t{max(apart):.3g}, mean of a probe's tokens"
    report = directory / "report.json"
    evals = json.loads(report.read_text()).get("evals", {}) if report.is_file() else {}
    for env, points in evals.items():
        passed = ", ".join(f"{point['pass@1'][0]:.3f}" for point in points)
        yield f"{name}: held-out pass@1 of {env}, by version\t{passed}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kernels", "learner", "run"))
    parser.add_argument("path", nargs="?", type=Path, default=Path())
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS)
    given = parser.parse_args()
    if given.what == "kernels":
        lines = kernels()
    elif given.what == "learner":
        lines = learner(given.path)
    else:
        lines = run(given.path, given.peak_tflops)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
