"""The log in files: a directory of Parquet (zstd) with a manifest, and a read-only `Log` over it.
docs/export.md describes the layout.

    DIR/manifest.json                                     run, run file, topics, partitions, a hash of every file
    DIR/rollouts.copy-digits/0-00000000000000000000.parquet    partition, offset of its first record

`value` is the record as it lay in the log, and the truth. Rollouts have it decoded beside it, for
queries; nothing here reads those columns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pyarrow.parquet as pq

from streamrl.errors import ExportError, InputGone, TopicMissing
from streamrl.log.chunks import JoiningReader
from streamrl.log.columns import RAW, arrow_schema, from_arrow, to_arrow
from streamrl.log.protocol import (
    Log,
    Message,
    NonTransactionalProducer,
    Offsets,
    Reader,
    TopicPartition,
    Writer,
)

FORMAT = 1
MANIFEST = "manifest.json"
GROUP_BYTES = 2_000_000  # keys and values of a row group: what a reader holds in memory
GROUP_ROWS = 8_192
FILE_BYTES = 256_000_000  # then the next file of a partition begins
# of a row group that is read, unpacked: what is written here has one of GROUP_BYTES and the largest
# message
READ_GROUP_BYTES = 64_000_000
MAX_GAP_OFFSETS = (
    10_000_000  # offsets of a partition without a record: an import writes placeholders there
)
TOPIC_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")


class ExportedFile(msgspec.Struct, frozen=True):
    name: str  # relative to the directory
    first: int  # offset of its first record
    last: int
    count: int
    size_bytes: int
    sha256: str


class ExportedPartition(msgspec.Struct, frozen=True):
    start: int  # as `Log.beginning_offsets` and `Log.end_offsets` said
    end: int
    files: list[ExportedFile] = []

    @property
    def count(self) -> int:
        return sum(file.count for file in self.files)


class ExportManifest(msgspec.Struct, frozen=True):
    run: str
    run_file: dict[str, Any]  # as resolved, without the cluster
    topics: dict[str, list[ExportedPartition]]  # by name without the run; partitions in their order
    format: int = FORMAT


# ---- writing -------------------------------------------------------------------------------------


def write_partition(
    directory: Path, where: TopicPartition, start: int, end: int, messages: Iterable[Message]
) -> ExportedPartition:
    """Write one partition's messages to files below `directory`, in bounded memory."""
    files: list[ExportedFile] = []
    for chunk in _files(_row_groups(messages)):
        files.append(_write_file(directory, where, chunk))
    return ExportedPartition(start, end, files)


def write_manifest(directory: Path, manifest: ExportManifest) -> None:
    (directory / MANIFEST).write_bytes(
        msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    )


def _row_groups(messages: Iterable[Message]) -> Iterator[list[Message]]:
    group, size = list[Message](), 0
    for message in messages:
        group.append(message)
        size += _size(message)
        if size >= GROUP_BYTES or len(group) >= GROUP_ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _files(groups: Iterator[list[Message]]) -> Iterator[Iterator[list[Message]]]:
    """Row groups by the file they go to. Each inner iterator is used up before the next is asked
    for.
    """

    def until_full(group: list[Message]) -> Iterator[list[Message]]:
        size = sum(map(_size, group))
        yield group
        while size < FILE_BYTES and (following := next(groups, None)):
            size += sum(map(_size, following))
            yield following

    while first := next(groups, None):
        yield until_full(first)


def _write_file(
    directory: Path, where: TopicPartition, groups: Iterator[list[Message]]
) -> ExportedFile:
    group = next(groups)
    first, last, count = group[0].offset, group[-1].offset, 0
    name = f"{where[0]}/{where[1]}-{first:020d}.parquet"
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    with pq.ParquetWriter(path, arrow_schema(where[0]), compression="zstd") as writer:
        while group:
            writer.write_table(to_arrow(where[0], group), row_group_size=len(group))
            count, last = count + len(group), group[-1].offset
            group = next(groups, [])
    return ExportedFile(name, first, last, count, path.stat().st_size, sha256_of(path))


def _size(message: Message) -> int:
    return (
        len(message.key or b"")
        + len(message.value or b"")
        + sum(len(name) + len(value) for name, value in message.headers)
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading -------------------------------------------------------------------------------------


@dataclass
class FileLog(Log):
    """An export as a log that can only be read. Raises ExportError where a file is missing or has
    changed; files are checked when first read.
    """

    directory: Path
    manifest: ExportManifest = field(init=False)
    _checked: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        path = self.directory / MANIFEST
        try:
            self.manifest = msgspec.json.decode(path.read_bytes(), type=ExportManifest)
        except OSError as error:
            raise ExportError(
                f"{path}: {error.strerror}; give a directory that `streamrl export` has written"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ExportError(
                f"{path} is damaged ({error}); export the run again, or take another copy"
            ) from None
        if self.manifest.format != FORMAT:
            raise ExportError(
                f"{path}: format {self.manifest.format} is not {FORMAT}, the one that is read here; use the streamrl that wrote it"
            )
        for problem in problems(self.manifest):
            raise ExportError(
                f"{path} is damaged ({problem}); export the run again, or take another copy"
            )

    @property
    def size_bytes(self) -> int:
        return sum(
            file.size_bytes
            for partitions in self.manifest.topics.values()
            for p in partitions
            for file in p.files
        )

    def topics(self) -> dict[str, int]:
        return {topic: len(partitions) for topic, partitions in self.manifest.topics.items()}

    def beginning_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return {tp: self.partition(*tp).start for tp in partitions}

    def end_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: self.partition(*tp).end for tp in partitions}

    def reader(self, offsets: Offsets, whole: bool = True, bounded: bool = False) -> Reader:
        reader = FileReader(self, offsets)
        return JoiningReader(reader, offsets, self) if whole else reader

    def writer(self, identity: str, changelog_topic: str = "") -> Writer:
        self._refuse(identity)

    def producer(self) -> NonTransactionalProducer:
        self._refuse("a part")

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        return {}  # a broker's own book-keeping is not exported; journals say the same

    def close(self) -> None: ...

    def partition(self, topic: str, partition: int) -> ExportedPartition:
        there = self.manifest.topics.get(topic, [])
        if partition >= len(there):
            raise TopicMissing(
                f"topic {topic} has no partition {partition} in {self.directory}; the run was exported without it"
            )
        return there[partition]

    def open(self, file: ExportedFile) -> pq.ParquetFile:
        """The file, once it is known to be the one that was written."""
        path = self.directory / file.name
        if path.is_symlink() or path.parent.is_symlink():
            raise ExportError(
                f"{path} is a link, and an export has none; export the run again, or take another copy"
            )
        try:
            if file.name not in self._checked and sha256_of(path) != file.sha256:
                raise ExportError(
                    f"{path} is damaged: not the {file.size_bytes:,} bytes that were written; export the run again, or take another copy"
                )
            self._checked.add(file.name)
            return pq.ParquetFile(path)
        except OSError as error:
            raise ExportError(
                f"{path} cannot be read ({error.strerror or error}); export the run again, or take another copy"
            ) from None

    def _refuse(self, who: str) -> NoReturn:
        raise ExportError(
            f"{self.directory} is an export and cannot be written to by {who}; `streamrl import` makes a run of it"
        )


class FileReader:
    """One row group a partition in memory at a time."""

    def __init__(self, log: FileLog, offsets: Offsets) -> None:
        self._log, self._positions, self._paused = log, dict(offsets), frozenset[str]()
        for topic, partition in offsets:
            log.partition(topic, partition)
        # reversed
        self._ahead: dict[TopicPartition, list[Message]] = {where: [] for where in offsets}
        self._groups: dict[TopicPartition, Iterator[list[Message]]] = {}

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """Never waits: nothing more will come."""
        found: list[Message] = []
        for where in self._positions:
            while where[0] not in self._paused and len(found) < max_messages and self._fill(where):
                message = self._ahead[where].pop()
                self._positions[where] = message.offset + 1
                found.append(message)
        return found

    def position(self, topic: str, partition: int) -> int:
        return self._positions[topic, partition]

    def set_paused(self, topics: Collection[str]) -> None:
        self._paused = frozenset(topics)

    def close(self) -> None:
        self._ahead, self._groups = {where: [] for where in self._positions}, {}

    def _fill(self, where: TopicPartition) -> bool:
        """Is there a message to take? Behind the last one the position moves to the end."""
        ahead, there, position = (
            self._ahead[where],
            self._log.partition(*where),
            self._positions[where],
        )
        if not there.start <= position <= there.end:
            raise InputGone(
                f"{where[0]}[{where[1]}] has no offset {position} in {self._log.directory}: it holds {there.start} to {there.end}"
            )
        if where not in self._groups:
            self._groups[where] = row_groups(where, there.files, position, self._log.open)
        while not ahead and (group := next(self._groups[where], None)) is not None:
            ahead.extend(reversed(group))
        if not ahead:
            self._positions[where] = there.end
        return bool(ahead)


def row_groups(
    where: TopicPartition,
    files: list[ExportedFile],
    start: int,
    opened: Callable[[ExportedFile], pq.ParquetFile],
) -> Iterator[list[Message]]:
    """Messages with start <= offset, a row group at a time; those before are not read."""
    for file in files:
        if file.last < start:
            continue
        with opened(file) as parquet:
            for index in range(parquet.metadata.num_row_groups):
                if (size := parquet.metadata.row_group(index).total_byte_size) > READ_GROUP_BYTES:
                    raise ExportError(
                        f"{file.name}: a row group unpacks to {size:,} bytes, more than the {READ_GROUP_BYTES:,} that are read here"
                    )
                if parquet.metadata.row_group(index).column(0).statistics.max >= start:
                    table = parquet.read_row_group(index, RAW.names, use_threads=False)
                    yield [
                        message for message in from_arrow(where, table) if message.offset >= start
                    ]


def problems(manifest: ExportManifest) -> Iterator[str]:
    """What `write_partition` would not have written: names that lead elsewhere, records outside of
    their partition, endless gaps.
    """
    for topic, partitions in manifest.topics.items():
        if not TOPIC_NAME.fullmatch(topic):
            yield f"{topic[:80]!r} is not the name of a topic"
        for number, partition in enumerate(partitions):
            following, gaps = partition.start, 0
            for file in partition.files:
                if file.name != f"{topic}/{number}-{file.first:020d}.parquet":
                    yield f"{file.name[:80]!r} is not the name of a file of {topic}[{number}]"
                if (
                    not following <= file.first <= file.last < partition.end
                    or not 0 < file.count <= file.last + 1 - file.first
                ):
                    yield f"{file.name[:80]}: {file.count} records from {file.first} to {file.last} of {partition.start} to {partition.end}"
                gaps += file.last + 1 - following - file.count
                following = file.last + 1
            if (
                not 0 <= partition.start <= partition.end
                or gaps + partition.end - following > MAX_GAP_OFFSETS
            ):
                yield f"{topic}[{number}] has {partition.count} records from {partition.start} to {partition.end}"
