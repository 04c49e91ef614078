"""Tools and turns learned live, as a user starts them: `streamrl up` on the run files that ship."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.loop.runs import ROOT, live

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.mark.parametrize("name", ["calculator", "guess-number"])
def test_it_is_learned_token_for_token(name: str, tmp_path: Path):
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / f"{name}.yaml").read_text())
    with live(tmp_path, settings) as run:
        run.up()
        ended = run.wait(900)
        found = run.report()["envs"][name]
        print(
            f"{name}: exit {ended}, {run.report()['steps']} steps in {run.report()['wall_s']:.0f}"
            f" s: {found}"
        )
        assert found["reward_mean_last20"] >= found["reward_mean_first20"] + 0.2, run.said()
        assert run.report()["logprob_mismatch_max_abs"] <= 1e-4
        run.nothing_left()
