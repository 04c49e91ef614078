"""Names that are too long end with a hash."""

from __future__ import annotations

from streamrl.envs.sessions.names import short_name
from streamrl.stream.records.limits import MAX_ID


def test_only_long_names_are_changed_and_stay_different():
    assert short_name("p" * MAX_ID) == "p" * MAX_ID
    long = [short_name("p" * 300), short_name("p" * 301), short_name("q" + "p" * 299)]
    assert len(set(long)) == 3
    assert max(map(len, long)) <= MAX_ID
    assert long[0].startswith("p" * 200 + "~")
    assert short_name("p" * 300) == long[0]
    assert len(short_name("\ud800" * 300)) <= MAX_ID
