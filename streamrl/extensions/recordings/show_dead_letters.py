"""Carries out `streamrl dead-letters`, and prints what there is and what was put back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from streamrl.extensions.recordings import dead_letters
from streamrl.stream.log.dead_letters import PREFIX, DeadLetter
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import ConfigError
from streamrl.system.text import printable

HEX_BYTES = 512  # the bytes of a record that are shown


def show_list(log: Log, console: Console) -> None:
    """Print how many letters there are for each topic and pattern of causes, and where and when the
    first and the last were dead-lettered. The pattern has separate lines, as it may be long.
    """
    summaries = dead_letters.summarize_causes(log)
    if not summaries:
        console.print("no dead letters")
        return
    for (topic, cause), summary in summaries.items():
        back = f", {summary.requeued:,} put back" if summary.requeued else ""
        console.print(
            Text.assemble(
                (topic, "cyan"),
                f"  {summary.letters:,} letters{back}  first {_when(summary.first)}  last"
                f" {_when(summary.last)}",
            )
        )
        console.print(Padding(Text(printable(dead_letters.readable_cause(cause))), (0, 0, 0, 4)))
    total = sum(summary.letters for summary in summaries.values())
    console.print(
        Text(
            f"{total:,} letters; `streamrl dead-letters show RUN TOPIC[PARTITION]@OFFSET` shows one"
        )
    )


def show_letter(log: Log, place: str, console: Console) -> None:
    """Print one letter: its cause, its headers, the fields that can be read, and its bytes.

    Raises ConfigError if there is no letter of a record at `place`.
    """
    letter = dead_letters.find(log, place)
    message = letter.message
    value = letter.message.value
    requeued = dead_letters.requeued_letters(log, letter.topic)
    back = ", put back since" if (message.partition, message.offset) in requeued else ""
    console.print(
        Text.assemble((str(letter), "bold"), f"  dead-lettered {_time(letter)}{back}"),
    )
    console.print(Text(printable(dead_letters.readable_cause(letter.cause)), style="red"))
    for fault in dead_letters.array_faults(value or b""):
        console.print(Text(printable(fault), style="red"))
    console.print(Text(f"key      {printable(repr(message.key))}"))
    for name, header in message.headers:
        if not name.startswith(PREFIX):
            console.print(Text(f"header   {printable(name)}: {printable(repr(header))}"))
    if value is None:
        console.print("no value")
        return
    for name, text in dead_letters.fields(value):
        console.print(
            Text.assemble((f"{printable(name)}: " if name else "", "cyan"), printable(text)),
            soft_wrap=True,
        )
    for line in hex_lines(value[:HEX_BYTES]):
        console.print(Text(line, style="dim"), soft_wrap=True)
    if len(value) > HEX_BYTES:
        console.print(f"{len(value) - HEX_BYTES:,} more bytes", highlight=False)


def retry_command(log: Log, which: str | None, cause: str, console: Console) -> None:
    """Requeue the letters whose cause contains `cause`, and print how many there were.

    `which` is a topic, or the place of one record; None means all topics. Raises ConfigError
    for a topic that has no dead letters.
    """
    known = dead_letters.topics(log)
    place: tuple[str, int, int] | None = None
    if which is not None and which not in known and "[" in which:
        place = dead_letters.parse_place(which)
    topic = place[0] if place else which
    if topic is not None and topic not in known:
        raise ConfigError(
            f"{topic}: there is no such topic with letters; {', '.join(known) or 'none'} may have"
            " some"
        )
    wanted = [topic] if topic is not None else known

    def chosen(letter: DeadLetter) -> bool:
        here = place is None or place == (letter.topic, letter.partition, letter.offset)
        return here and (cause in letter.cause or cause in dead_letters.cause_pattern(letter.cause))

    counts = dead_letters.retry(log, wanted, chosen)
    for name, count in counts.items():
        console.print(f"{count:,} records put back to {name}", highlight=False)
    if not counts:
        console.print("nothing to put back: no such letter, or all of them are put back already")


def hex_lines(data: bytes) -> Iterator[str]:
    """A hex dump: lines of an offset, sixteen bytes, and their printable ASCII characters."""
    for start in range(0, len(data), 16):
        piece = data[start : start + 16]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        yield f"{start:08x}  {piece.hex(' '):<47}  {characters}"


def _when(letter: DeadLetter) -> str:
    return f"[{letter.partition}]@{letter.offset} {_time(letter)}"


def _time(letter: DeadLetter) -> str:
    timestamp_s = letter.message.timestamp_s
    try:
        return f"{datetime.fromtimestamp(timestamp_s):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):  # a producer gives any time
        return f"{timestamp_s:g} s"
