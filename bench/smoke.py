"""Has the data path become slower? Ours to plain Kafka in one short run, against the ratio that is
recorded.

python -m bench.smoke            fails when twice in a row below 60 % of it
python -m bench.smoke --record   the ratio as of now: bench/results/smoke.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.data_path import in_turns, ratio
from bench.lines import Place
from bench.measure import RESULTS, write
from bench.memory import fill_page_cache
from bench.work import Shape

RECORDED = RESULTS / "smoke.json"
ENOUGH = 0.6  # of the recorded ratio: what a busy machine does to it is less than that
WARM_S = 20.0
ROUNDS = 3
ROUND_S = 3.0
# bytes a rollout, as `make bench` measures them
HOPS = {"rollouts": 7_320.0, "groups": 6_300.0, "batches": 6_290.0}


def measure() -> float:
    """Ours to raw, the median of some short rounds."""
    shape = Shape()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        fill_page_cache(Path(directory))
        place = Place(Path(directory), stack)
        ours = place.ours("bench", shape)
        ours.turn(WARM_S)
        raw = place.raw("raw", shape, HOPS)
        raw.turn(WARM_S / 8)
        own, ceiling = in_turns((ours, raw), ROUNDS, ROUND_S)
    for name, results in (("ours", own), ("plain Kafka", ceiling)):
        print(
            f"{name}: {', '.join(format(result['rollouts_per_s'], ',.0f') for result in results)}"
            " rollouts/s"
        )
    return ratio(own, ceiling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        write(
            RECORDED,
            {"ratio_to_raw": round(measure(), 3), "command": "python -m bench.smoke --record"},
        )
        return
    least = ENOUGH * json.loads(RECORDED.read_text())["ratio_to_raw"]
    for _ in range(2):
        try:
            found = measure()
        except SystemExit as ended:  # a station on a machine that is too busy
            print(ended)
            continue
        print(f"ours to plain Kafka: {found:.2f}; at least {least:.2f} is wanted")
        if found >= least:
            return
    sys.exit(
        f"bench: the data path has become slower: twice not {least:.2f} of plain Kafka; `make"
        " bench` shows where the time goes"
    )


if __name__ == "__main__":
    main()
