from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.stream.log import parquet
from streamrl.stream.log.parquet import ExportManifest, FileLog, write_manifest, write_partition
from streamrl.stream.log.protocol import Message, beginning_offset, end_offset
from streamrl.stream.log.reading import read
from streamrl.system.errors import ExportError, InputGone

WHERE = ("fates", 0)


def message(offset: int, value: bytes | None = b"v", key: bytes | None = b"k") -> Message:
    return Message(
        topic="fates",
        key=key,
        value=value,
        headers=(("schema", b"fate/1"), ("schema", b"\xff")),
        partition=0,
        offset=offset,
        timestamp_s=1_700_000_000.123 + offset,
    )


def written(directory: Path, messages: list[Message], start: int = 0, end: int = 0) -> FileLog:
    directory.mkdir()
    partition = write_partition(directory, WHERE, start, end or messages[-1].offset + 1, messages)
    write_manifest(directory, ExportManifest("small", {}, {"fates": [partition]}))
    return FileLog(directory)


def test_what_is_written_is_read_again(tmp_path: Path):
    there = [message(3, b"\x00\xff" * 9), message(4, None), message(7, b"", None)]
    log = written(tmp_path / "x", there, start=2, end=9)
    assert list(read(log, "fates", 0, 2)) == there
    assert (beginning_offset(log, "fates", 0), end_offset(log, "fates", 0), log.topics()) == (
        2,
        9,
        {"fates": 1},
    )


def test_row_groups_and_files_are_bounded_and_reading_starts_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parquet, "GROUP_BYTES", 40)
    monkeypatch.setattr(parquet, "FILE_BYTES", 100)
    there = [message(offset) for offset in range(0, 60, 2)]
    log = written(tmp_path / "x", there)
    (partition,) = log.manifest.topics["fates"]
    assert len(partition.files) > 3 and partition.count == 30
    assert [(file.first, file.last) for file in partition.files] == [
        (f.first, f.first + 2 * f.count - 2) for f in partition.files
    ]
    for start in range(60):
        assert [m.offset for m in read(log, "fates", 0, start)] == [
            m.offset for m in there if m.offset >= start
        ]


def test_only_the_files_that_are_needed_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parquet, "FILE_BYTES", 1)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    log = written(tmp_path / "x", [message(offset) for offset in range(5)])
    (log.directory / "fates" / f"0-{1:020d}.parquet").unlink()
    assert [m.offset for m in read(log, "fates", 0, 2)] == [2, 3, 4]
    with pytest.raises(ExportError, match=r"fates/0-0+1\.parquet cannot be read \(No such file"):
        list(read(log, "fates", 0, 0))


def test_a_file_that_was_changed_is_refused(tmp_path: Path):
    log = written(tmp_path / "x", [message(0)])
    path = log.directory / log.manifest.topics["fates"][0].files[0].name
    data = path.read_bytes()
    for spoilt in (data[:-1], data[:99] + bytes([data[99] ^ 1]) + data[100:]):
        path.write_bytes(spoilt)
        with pytest.raises(ExportError, match="damaged") as error:
            list(read(FileLog(log.directory), "fates", 0, 0))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "is no Parquet"),
        (pa.table({"offset": ["0"]}), "has other columns than offset, timestamp"),
        (pa.table({"key": [b"k"]}), "has other columns than offset, timestamp"),
    ],
)
def test_a_file_that_somebody_else_made_is_refused(
    tmp_path: Path, table: pa.Table | None, says: str
):
    """Its hash may be right: an export is a directory that anybody can write."""
    log = written(tmp_path / "x", [message(0)])
    path = log.directory / log.manifest.topics["fates"][0].files[0].name
    if table is None:
        path.write_bytes(b"text")
    else:
        pq.write_table(table, path)
    manifest = log.directory / "manifest.json"
    before = log.manifest.topics["fates"][0].files[0].sha256
    manifest.write_text(manifest.read_text().replace(before, parquet.sha256_of(path)))
    with pytest.raises(ExportError, match=says):
        list(read(FileLog(log.directory), "fates", 0, 0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b'{"run_file":' + b"[" * 100_000, "is damaged"),
        (
            b'{"run": 1, "run_file": {}, "topics": {}}',
            r"is damaged \(Expected `str`, got `int` - at `\$\.run`\)",
        ),
        (b'{"run": "r", "run_file": {}, "topics": {}, "format": 9}', "format 9 is not 1"),
    ],
)
def test_a_manifest_that_cannot_be_used(tmp_path: Path, text: bytes, says: str):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(ExportError, match=says):
        FileLog(tmp_path)


def test_a_directory_that_is_no_export(tmp_path: Path):
    with pytest.raises(ExportError, match=r"manifest\.json: No such file .*streamrl export"):
        FileLog(tmp_path)


def test_it_cannot_be_written_to(tmp_path: Path):
    log = written(tmp_path / "x", [message(0)])
    for write in (lambda: log.writer("buffer"), log.producer):
        with pytest.raises(ExportError, match="streamrl import"):
            write()
    assert log.committed_offsets("buffer") == {}


def test_an_offset_below_what_was_kept_is_gone(tmp_path: Path):
    log = written(tmp_path / "x", [message(5)], start=5)
    with pytest.raises(InputGone, match=r"no offset 4 .* 5 to 6"):
        log.reader({WHERE: 4}).poll(1, 0)


def test_a_reader_passes_what_no_reader_sees_at_the_end(tmp_path: Path):
    reader = written(tmp_path / "x", [message(0)], end=4).reader({WHERE: 0})
    assert len(reader.poll(1, 0)) == 1 and reader.position(*WHERE) == 1
    assert reader.poll(1, 0) == [] and reader.position(*WHERE) == 4
