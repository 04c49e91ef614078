"""What lines and tables on the terminal are made of: quoted texts, numbers, shares and times."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from streamrl.system.text import escaped

DASH = "–"  # a value that is not known
MOST_NAMED = 8  # envs, servers or parts that a line names one by one
STATE_STYLES = {
    "running": "green",
    "ready": "green",
    "starting": "yellow",
    "swapping": "cyan",
    "silent": "yellow",
    "back-off": "yellow",
    "error": "bold red",
}


def quoted(text: str, style: str = "") -> Text:
    """Text that others have written, with neither markup nor control characters interpreted."""
    return Text(escaped(text), style=style)


def state_cell(state: str, mark: str = "") -> Text:
    """The state of a part or a server in its colour, after `mark`."""
    return Text(f"{mark}{state}", style=STATE_STYLES.get(state, ""))


def number(value: float | None, form: str, missing: str = DASH) -> str:
    """The value in a format such as `.3f`, or `missing` if it is None."""
    return missing if value is None else format(value, form)


def first_of(texts: Sequence[str], separator: str = ", ") -> str:
    """The first texts, and how many more there are."""
    more = len(texts) - MOST_NAMED
    counted = [f"and {more:,} more"] if more > 0 else []
    return separator.join([*texts[:MOST_NAMED], *counted])


def percent(share: float | None, missing: str = DASH) -> str:
    """A share in percent: 0.125 gives 12.5 %."""
    return missing if share is None else f"{100 * share:.1f} %"


def clock(seconds: float | None) -> str:
    """A duration as text: 75 gives 1:15, an hour gives 1:00:00, and None a dash."""
    if seconds is None or not math.isfinite(seconds):  # A record may have any float.
        return DASH
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
