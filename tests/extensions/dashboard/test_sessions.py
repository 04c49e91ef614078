from __future__ import annotations

from msgspec import structs

from streamrl.extensions.dashboard.sessions import (
    END_LENGTH,
    MOST_ENDS,
    OTHER,
    SessionCounts,
    end_of,
)
from streamrl.stream.records import Rollout
from tests.support.build import rollout


def with_metadata(**metadata: object) -> Rollout:
    return structs.replace(rollout("agent", "g", 0), metadata=metadata)


def test_a_session_ends_by_itself_at_a_limit_or_without_anything_to_train_on():
    assert end_of(with_metadata()) == "finished"
    cut_off = structs.replace(with_metadata(truncation="time"), truncated=True)
    assert end_of(cut_off) == "cut off: time"
    failed = rollout("agent", "g", 0, failure="it" + "s rewards did not come" * 9)
    assert end_of(failed).startswith("failed: its rewards") and len(end_of(failed)) == END_LENGTH


def test_agents_cannot_make_more_ends_than_can_be_shown():
    counts = SessionCounts()
    for reason in range(3 * MOST_ENDS):
        counts.add(rollout("agent", "g", 0, failure=f"reason {reason}"), 0)
    assert len(counts.ends()) == MOST_ENDS + 1 and counts.ends()[OTHER] == 2 * MOST_ENDS


def test_forks_are_counted_by_their_cause_and_nothing_else_is():
    counts = SessionCounts()
    counts.add(with_metadata(forks={"template": 2, "edit": 1}), 3)
    counts.add(with_metadata(forks={"template": 1, "of an agent": 7, "edit": "many"}), 5)
    counts.add(with_metadata(forks=[9]), 5)
    assert counts.forks() == {"template": 3, "edit": 1}
    assert counts.forks(4) == {"template": 2, "edit": 1} and counts.forks(2) == {}
