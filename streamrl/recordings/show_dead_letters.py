"""What `streamrl dead-letters` prints."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from streamrl.errors import ConfigError
from streamrl.log.dead_letters import PREFIX, DeadLetter, printable
from streamrl.log.protocol import Log
from streamrl.recordings import dead_letters

HEX_BYTES = 512  # of a record, shown


def show_list(log: Log, console: Console) -> None:
    """Two lines for each topic and kind of cause: how many, where and when; then the cause, which
    may be long.
    """
    rows = dead_letters.summarize_causes(log)
    if not rows:
        console.print("nothing was put aside")
        return
    for (topic, cause), row in rows.items():
        back = f", {row.retried:,} put back" if row.retried else ""
        console.print(
            Text.assemble(
                (topic, "cyan"),
                f"  {row.letters:,} letters{back}  first {_when(row.first)}  last"
                f" {_when(row.last)}",
            )
        )
        console.print(Padding(Text(printable(dead_letters.readable_cause(cause))), (0, 0, 0, 4)))
    total = sum(row.letters for row in rows.values())
    console.print(
        Text(
            f"{total:,} letters; `streamrl dead-letters show RUN TOPIC[PARTITION]@OFFSET` shows one"
        )
    )


def show_letter(log: Log, place: str, console: Console) -> None:
    """One letter: why it was put aside, its headers, its fields as far as they can be read, its
    bytes.
    """
    letter = dead_letters.find(log, place)
    message = letter.message
    value = letter.message.value
    back = (message.partition, message.offset) in dead_letters.retried(log, letter.topic)
    console.print(
        Text.assemble(
            (str(letter), "bold"),
            f"  put aside {_time(letter)}{', put back since' if back else ''}",
        )
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


def put_back(log: Log, which: str | None, cause: str, console: Console) -> None:
    """Put back the letters of a topic, or one by its place, or all; of them, those whose cause
    contains `cause`.
    """
    known = dead_letters.topics(log)
    place = (
        dead_letters.parse_place(which)
        if which is not None and which not in known and "[" in which
        else None
    )
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

    for name, count in (counts := dead_letters.retry(log, wanted, chosen)).items():
        console.print(f"{count:,} records put back to {name}", highlight=False)
    if not counts:
        console.print("nothing to put back: no such letter, or all of them are put back already")


def hex_lines(data: bytes) -> Iterator[str]:
    """Sixteen bytes a line: their place, their values, and as text where they are some."""
    for start in range(0, len(data), 16):
        piece = data[start : start + 16]
        yield (
            f"{start:08x}  {piece.hex(' '):<47} "
            f" {''.join(chr(b) if 32 <= b < 127 else '.' for b in piece)}"
        )


def _when(letter: DeadLetter) -> str:
    return f"[{letter.partition}]@{letter.offset} {_time(letter)}"


def _time(letter: DeadLetter) -> str:
    return f"{datetime.fromtimestamp(letter.message.timestamp_s):%Y-%m-%d %H:%M:%S}"
