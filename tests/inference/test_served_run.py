"""Whose version a server loads next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from streamrl.inference.served_run import ServedRun, load_next
from streamrl.records import PolicyVersion


class Host:
    def load_version(self, version: PolicyVersion, guest: str) -> Any:
        return guest, version.version


def served(guest: str, version: int | None) -> ServedRun:
    made = ServedRun(
        guest=guest, announced=cast(Any, None), entry=cast(Any, None), meter=cast(Any, None)
    )
    if version is not None:
        made.newest = PolicyVersion(
            learner="lead", version=version, uri="file:///x", size_bytes=1, sha256="0"
        )
    return made


def test_the_run_that_has_waited_longest_is_next():
    runs = [served("", 3), served("b", 5), served("c", None)]
    loaded: list[Any] = []
    with ThreadPoolExecutor(1) as worker:
        for time_s in (10.0, 11.0, 12.0):
            loading = load_next(runs, cast(Any, Host()), worker, time_s)
            loaded.append(loading.job.result() if loading else None)
        # Both have a newer version: the one that was loaded less recently comes first.
        runs[0].newest = served("", 4).newest
        runs[1].newest = served("b", 6).newest
        again = load_next(runs, cast(Any, Host()), worker, 13.0)
        assert again is not None and again.job.result() == ("", 4)
    assert loaded == [("", 3), ("b", 5), None]
