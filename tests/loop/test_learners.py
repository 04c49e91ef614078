"""A second learner with another loss joins a live run: it begins where the lead was, follows the
same batches, and nobody notices.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from streamrl.extensions.recordings.audit import audit
from streamrl.stream.records import Batch, PolicyVersion, Server
from tests.loop.runs import ROOT, STREAMRL, Live, live, quickstart
from tests.support.waiting import patience

AT = 2
SETTINGS = {
    **quickstart(),
    "orchestrator": {},
    "learner": {"learning_rate": 1.0e-3, "checkpoint_every": 2, "keep_checkpoints": 100},
}
SECOND = (
    "--name",
    "second",
    "--at",
    str(AT),
    "--set",
    "learner.loss=clipped-ratio",
    "--set",
    "learner.learning_rate=0.01",
)


def announced(run: Live, learner: str) -> dict[int, PolicyVersion]:
    records = run.records("policy-versions", "policy-version")
    return {r.version: r for r in records if isinstance(r, PolicyVersion) and r.learner == learner}


@pytest.mark.live
@pytest.mark.slow
def test_a_second_learner_joins_a_live_run(tmp_path: Path):
    with live(tmp_path, SETTINGS) as run:
        run.up()
        run.until(lambda: run.version() >= AT + 2, f"version {AT + 2}", 400)
        with (tmp_path / "second.log").open("wb") as output:
            command = [*STREAMRL, "learner", str(run.run.directory / "run.yaml"), *SECOND]
            second = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, env=run.environment
            )

        def caught_up() -> bool:
            assert second.poll() is None, (tmp_path / "second.log").read_text()
            return max(announced(run, "second"), default=-1) >= AT + 4

        run.until(caught_up, f"version {AT + 4} of the second learner", 240)
        run.advances(2, "of the lead, beside it", 120)
        second.terminate()
        assert second.wait(patience(60)) == 0, (tmp_path / "second.log").read_text()
        run.advances(1, "of the lead, without it", 120)

        lead = announced(run, "lead")
        other = announced(run, "second")
        assert sorted(lead) == list(range(max(lead) + 1)) and sorted(other) == list(
            range(AT, max(other) + 1)
        )
        assert other[AT].sha256 == lead[AT].sha256 and other[AT + 1].sha256 != lead[AT + 1].sha256
        assert all(record.uri.startswith(f"{run.run.store}/second/") for record in other.values())

        numbers = [
            record.number for record in run.records("batches", "batch") if isinstance(record, Batch)
        ]
        # made for the lead's versions, no others'
        assert numbers == list(range(len(numbers))) and max(lead) <= len(numbers) <= max(lead) + 2
        servers = [
            record for record in run.records("servers", "server") if isinstance(record, Server)
        ]
        # the lead's: probes agree
        assert (
            not any(record.error for record in servers)
            and max(record.version for record in servers) >= AT + 4
        )
        account = audit(run.log(), run.run)
        assert account.balanced, account.problems
