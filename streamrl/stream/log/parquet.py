"""The log in files: a directory of Parquet files (zstd) with a manifest, and a read-only `Log` over
it. docs/export.md describes the layout.

    DIR/manifest.json    run, run file, topics, partitions, a hash of every file
    DIR/rollouts.copy-digits/0-00000000000000000000.parquet    partition, offset of the first record

The column `value` is the record as it was in the log. Rollouts also have decoded columns, for
queries; nothing here reads those.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.stream.log.chunks import JoiningReader, size_of
from streamrl.stream.log.columns import RAW, arrow_schema, from_arrow, to_arrow
from streamrl.stream.log.protocol import (
    Log,
    Message,
    NonTransactionalProducer,
    Offsets,
    Reader,
    TopicPartition,
    Writer,
)
from streamrl.system.errors import ExportError, InputGone, TopicMissing

FORMAT = 1
MANIFEST = "manifest.json"
GROUP_BYTES = 2_000_000  # size of a row group, which a reader holds in memory
GROUP_ROWS = 8_192
FILE_BYTES = 256_000_000  # then the next file of a partition begins
# The most that a row group may unpack to where it is read. One that is written here has GROUP_BYTES
# and the largest message.
READ_GROUP_BYTES = 64_000_000
# The most offsets of a partition that may hold no record. An import writes placeholders there.
MAX_GAP_OFFSETS = 10_000_000
TOPIC_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")
EXPORT_AGAIN = "export the run again, or take another copy"


class ExportedFile(msgspec.Struct, frozen=True):
    name: str  # relative to the directory
    first: int  # offset of its first record
    last: int
    count: int
    size_bytes: int
    sha256: str


class ExportedPartition(msgspec.Struct, frozen=True):
    start: int  # its beginning offset in the log
    end: int  # its end offset
    files: list[ExportedFile] = []

    @property
    def count(self) -> int:
        return sum(file.count for file in self.files)


class ExportManifest(msgspec.Struct, frozen=True):
    run: str
    run_file: dict[str, Any]  # as resolved, without the cluster
    topics: dict[str, list[ExportedPartition]]  # by name without the run; partitions in order
    format: int = FORMAT


def write_partition(
    directory: Path, tp: TopicPartition, start: int, end: int, messages: Iterable[Message]
) -> ExportedPartition:
    """Write the messages of one partition to files below `directory`, in bounded memory."""
    files: list[ExportedFile] = []
    for groups in _files(_row_groups(messages)):
        files.append(_write_file(directory, tp, groups))
    return ExportedPartition(start, end, files)


def write_manifest(directory: Path, manifest: ExportManifest) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(encoded + b"\n")


def _row_groups(messages: Iterable[Message]) -> Iterator[list[Message]]:
    group: list[Message] = []
    group_bytes = 0
    for message in messages:
        group.append(message)
        group_bytes += size_of(message)
        if group_bytes >= GROUP_BYTES or len(group) >= GROUP_ROWS:
            yield group
            group = []
            group_bytes = 0
    if group:
        yield group


def _files(groups: Iterator[list[Message]]) -> Iterator[Iterator[list[Message]]]:
    """Row groups by the file they go to. Each inner iterator must be exhausted before the next is
    asked for.
    """

    def until_full(group: list[Message]) -> Iterator[list[Message]]:
        file_bytes = sum(map(size_of, group))
        yield group
        while file_bytes < FILE_BYTES and (following := next(groups, None)):
            file_bytes += sum(map(size_of, following))
            yield following

    while first := next(groups, None):
        yield until_full(first)


def _write_file(
    directory: Path, tp: TopicPartition, groups: Iterator[list[Message]]
) -> ExportedFile:
    topic, partition = tp
    group = next(groups)
    first = group[0].offset
    last = first
    count = 0
    name = f"{topic}/{partition}-{first:020d}.parquet"
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    with pq.ParquetWriter(path, arrow_schema(topic), compression="zstd") as writer:
        while group:
            writer.write_table(to_arrow(topic, group), row_group_size=len(group))
            count += len(group)
            last = group[-1].offset
            group = next(groups, [])
    return ExportedFile(
        name=name,
        first=first,
        last=last,
        count=count,
        size_bytes=path.stat().st_size,
        sha256=sha256_of(path),
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class FileLog(Log):
    """An export as a log that can only be read. A file is checked when it is first read, and
    ExportError is raised where one is missing or has changed.
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
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ExportError(f"{path} is damaged ({error}); {EXPORT_AGAIN}") from None
        if self.manifest.format != FORMAT:
            raise ExportError(
                f"{path}: format {self.manifest.format} is not {FORMAT}, the one that is read "
                "here; use the streamrl that wrote it"
            )
        for problem in problems(self.manifest):
            raise ExportError(f"{path} is damaged ({problem}); {EXPORT_AGAIN}")

    @property
    def size_bytes(self) -> int:
        return sum(
            file.size_bytes
            for partitions in self.manifest.topics.values()
            for partition in partitions
            for file in partition.files
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

    def producer(self, durable: bool = False) -> NonTransactionalProducer:
        self._refuse("a part")

    def committed_offsets(self, identity: str) -> dict[TopicPartition, int]:
        return {}  # the broker's own topics are not exported; journals have the same

    def close(self) -> None: ...

    def partition(self, topic: str, partition: int) -> ExportedPartition:
        partitions = self.manifest.topics.get(topic, [])
        if partition >= len(partitions):
            raise TopicMissing(
                f"topic {topic} has no partition {partition} in {self.directory}; "
                "the run was exported without it"
            )
        return partitions[partition]

    def open(self, file: ExportedFile) -> pq.ParquetFile:
        """Open a file once it is known to be the one that was written."""
        path = self.directory / file.name
        if path.is_symlink() or path.parent.is_symlink():
            raise ExportError(f"{path} is a link, and an export has none; {EXPORT_AGAIN}")
        try:
            if file.name not in self._checked and sha256_of(path) != file.sha256:
                raise ExportError(
                    f"{path} is damaged: not the {file.size_bytes:,} bytes that were written; "
                    f"{EXPORT_AGAIN}"
                )
            self._checked.add(file.name)
            return self._parquet(path)
        except OSError as error:
            reason = error.strerror or error
            raise ExportError(f"{path} cannot be read ({reason}); {EXPORT_AGAIN}") from None

    def _parquet(self, path: Path) -> pq.ParquetFile:
        """The file at `path`, which is refused unless it has the columns that are written."""
        try:
            parquet = pq.ParquetFile(path)
        except pa.ArrowException as error:
            raise ExportError(f"{path} is no Parquet ({error}); {EXPORT_AGAIN}") from None
        found = list(parquet.schema_arrow)[: len(RAW)]
        if [(column.name, column.type) for column in found] != [(c.name, c.type) for c in RAW]:
            raise ExportError(
                f"{path} has other columns than {', '.join(RAW.names)}; {EXPORT_AGAIN}"
            )
        return parquet

    def _refuse(self, who: str) -> NoReturn:
        raise ExportError(
            f"{self.directory} is an export and cannot be written to by {who}; "
            "`streamrl import` makes a run of it"
        )


class FileReader:
    """Holds one row group of each partition in memory."""

    def __init__(self, log: FileLog, offsets: Offsets) -> None:
        self._log = log
        self._offsets = dict(offsets)
        self._reading = tuple(offsets)
        self._paused = frozenset[str]()
        # messages of the row group that are still to be returned, in reverse
        self._ahead: dict[TopicPartition, list[Message]] = {tp: [] for tp in offsets}
        self._groups: dict[TopicPartition, Iterator[list[Message]]] = {}
        for tp in offsets:
            log.partition(*tp)  # raises TopicMissing

    def poll(self, max_messages: int, timeout_s: float) -> list[Message]:
        """As `Reader.poll`, but it never waits: nothing more will come."""
        messages: list[Message] = []
        for tp in self._reading:
            if tp[0] in self._paused:
                continue
            while len(messages) < max_messages and self._read_ahead(tp):
                message = self._ahead[tp].pop()
                self._offsets[tp] = message.offset + 1
                messages.append(message)
        return messages

    def position(self, topic: str, partition: int) -> int:
        return self._offsets[topic, partition]

    def set_paused(self, topics: Collection[str]) -> None:
        self._paused = frozenset(topics)

    def seek(self, offsets: Offsets) -> None:
        self._reading = tuple(offsets)
        for tp, offset in offsets.items():
            if offset != self._offsets[tp]:
                self._offsets[tp] = offset
                self._ahead[tp] = []
                self._groups.pop(tp, None)

    def close(self) -> None:
        self._ahead = {tp: [] for tp in self._offsets}
        self._groups = {}

    def _read_ahead(self, tp: TopicPartition) -> bool:
        """Whether there is a message to return. After the last one the position moves to the
        end.
        """
        ahead = self._ahead[tp]
        partition = self._log.partition(*tp)
        offset = self._offsets[tp]
        if not partition.start <= offset <= partition.end:
            raise InputGone(
                f"{tp[0]}[{tp[1]}] has no offset {offset} in {self._log.directory}: "
                f"it holds {partition.start} to {partition.end}"
            )
        if tp not in self._groups:
            self._groups[tp] = row_groups(tp, partition.files, offset, self._log.open)
        while not ahead and (group := next(self._groups[tp], None)) is not None:
            ahead.extend(reversed(group))
        if not ahead:
            self._offsets[tp] = partition.end
        return bool(ahead)


def row_groups(
    tp: TopicPartition,
    files: list[ExportedFile],
    start: int,
    opened: Callable[[ExportedFile], pq.ParquetFile],
) -> Iterator[list[Message]]:
    """Messages with start <= offset, a row group at a time. Row groups before them are not read."""
    for file in files:
        if file.last < start:
            continue
        with opened(file) as parquet:
            for index in range(parquet.metadata.num_row_groups):
                metadata = parquet.metadata.row_group(index)
                if metadata.total_byte_size > READ_GROUP_BYTES:
                    raise ExportError(
                        f"{file.name}: a row group unpacks to {metadata.total_byte_size:,} bytes, "
                        f"more than the {READ_GROUP_BYTES:,} that are read here"
                    )
                offsets = metadata.column(0).statistics
                if offsets is not None and offsets.max < start:
                    continue
                table = parquet.read_row_group(index, RAW.names, use_threads=False)
                yield [message for message in from_arrow(tp, table) if message.offset >= start]


def problems(manifest: ExportManifest) -> Iterator[str]:
    """What `write_partition` would not have written: names that lead elsewhere, records outside of
    their partition, endless gaps.
    """
    for topic, partitions in manifest.topics.items():
        if not TOPIC_NAME.fullmatch(topic):
            yield f"{topic[:80]!r} is not the name of a topic"
        for number, partition in enumerate(partitions):
            yield from _problems_of_partition(topic, number, partition)


def _problems_of_partition(topic: str, number: int, partition: ExportedPartition) -> Iterator[str]:
    next_offset = partition.start
    gap_offsets = 0
    for file in partition.files:
        if file.name != f"{topic}/{number}-{file.first:020d}.parquet":
            yield f"{file.name[:80]!r} is not the name of a file of {topic}[{number}]"
        in_order = next_offset <= file.first <= file.last < partition.end
        if not in_order or not 0 < file.count <= file.last + 1 - file.first:
            yield (
                f"{file.name[:80]}: {file.count} records from {file.first} to {file.last} "
                f"of {partition.start} to {partition.end}"
            )
        gap_offsets += file.last + 1 - next_offset - file.count
        next_offset = file.last + 1
    gap_offsets += partition.end - next_offset
    if not 0 <= partition.start <= partition.end or gap_offsets > MAX_GAP_OFFSETS:
        yield (
            f"{topic}[{number}] has {partition.count} records "
            f"from {partition.start} to {partition.end}"
        )
