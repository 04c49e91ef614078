"""What lies in the directory of a local broker; no broker is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from streamrl.stream.local_kafka import broker, storage
from streamrl.system.errors import BrokerError


def test_too_little_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(BrokerError, match="free some space"):
        broker.start(tmp_path)
    assert not (tmp_path / "data").exists()


def test_enough_disk_is_enough(tmp_path: Path):
    storage.check_free_space(tmp_path)


def test_data_is_formatted_once_it_has_its_name_and_clean_once_kafka_says_so(tmp_path: Path):
    (tmp_path / "data.new").mkdir()
    (tmp_path / "data.new" / "meta.properties").write_text("node.id=1\n")
    assert not storage.is_formatted(tmp_path)
    (tmp_path / "data.new").rename(tmp_path / "data")
    assert storage.is_formatted(tmp_path) and not storage.was_shut_down(tmp_path)
    (tmp_path / "data" / storage.CLEAN_SHUTDOWN).write_text("")
    assert storage.was_shut_down(tmp_path)


def test_a_tool_that_cannot_format_is_quoted_and_leaves_no_data(tmp_path: Path):
    fails = [sys.executable, "-c", "print('No space left on device'); raise SystemExit(1)"]
    with pytest.raises(BrokerError, match=f"the disk that holds {tmp_path} is full"):
        storage.format_data(tmp_path, fails, 20001, 20002, {})
    assert not storage.is_formatted(tmp_path) and not (tmp_path / "format.properties").exists()


def test_own_settings_stand_last_and_may_name_the_ports(tmp_path: Path):
    config = tmp_path / "server.properties"
    own = {"listeners": "SSL://127.0.0.1:${port}", "num.io.threads": "2"}
    storage.write_properties(config, tmp_path / "data", 20001, 20002, own)
    lines = config.read_text().splitlines()
    assert lines[-2:] == ["listeners=SSL://127.0.0.1:20001", "num.io.threads=2"]
    assert f"log.dirs={tmp_path}/data" in lines
    assert "$" not in "".join(line for line in lines if not line.startswith("#"))


def test_the_log_of_the_start_before_is_kept(tmp_path: Path):
    assert storage.rotate_log(tmp_path) == tmp_path / "broker.log"
    for text in ("first", "second"):
        (tmp_path / "broker.log").write_text(text)
        assert not storage.rotate_log(tmp_path).exists()
    assert (tmp_path / "broker.log.1").read_text() == "second"


def test_the_data_have_one_owner_and_whoever_inherits_the_lock_is_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage, "EXIT_LIMIT_S", 0.05)
    with storage.sole_owner(tmp_path) as owner:
        heir = os.dup(owner)
    with (
        pytest.raises(BrokerError, match=f"another broker works in {tmp_path}; stop it first"),
        storage.sole_owner(tmp_path),
    ):
        pass
    os.close(heir)
    with storage.sole_owner(tmp_path):
        pass


def test_what_the_controller_has_written_is_measured(tmp_path: Path):
    assert storage.metadata_bytes(tmp_path) == 0
    directory = tmp_path / "data" / "__cluster_metadata-0"
    directory.mkdir(parents=True)
    for name in ("00.log", "01.log", "00.index"):
        (directory / name).write_bytes(b"." * 10)
    assert storage.metadata_bytes(tmp_path) == 20


def test_the_last_start_is_known_and_a_broken_note_is_none(tmp_path: Path):
    assert storage.read_broker_json(tmp_path) == {}
    storage.write_broker_json(tmp_path, {"pid": 7, "port": 20001})
    assert storage.read_broker_json(tmp_path) == {"pid": 7, "port": 20001}
    assert [path.name for path in tmp_path.iterdir()] == ["broker.json"]
    (tmp_path / "broker.json").write_text("{")
    assert storage.read_broker_json(tmp_path) == {}
