from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.ownership import is_ours


@pytest.mark.parametrize(("mode", "ours"), [(0o755, True), (0o775, True), (0o757, False)])
def test_a_place_that_others_may_write_to_is_not_ours(mode: int, ours: bool, tmp_path: Path):
    tmp_path.chmod(mode)
    assert is_ours(tmp_path) == ours


def test_a_group_that_is_not_the_users_own_is_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tmp_path.chmod(0o775)
    monkeypatch.setattr("os.getgid", lambda: tmp_path.stat().st_gid + 1)
    assert not is_ours(tmp_path)


def test_a_place_of_another_user_is_not_ours_and_one_of_root_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    assert is_ours(tmp_path) == (tmp_path.stat().st_uid == 0)
    assert is_ours(Path("/"))


def test_a_place_that_is_not_there_is_not_ours(tmp_path: Path):
    assert not is_ours(tmp_path / "nowhere")
