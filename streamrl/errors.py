"""What can go wrong, as a tree. A StreamrlError is one line for the user: what, where, and what to
do; the CLI prints it without a traceback.

StreamrlError            exit 1 ├── ConfigError          exit 2   the run file or an option ├──
BrokerError │   ├── BrokerUnreachable     exit 3 │   ├── TopicMissing          exit 4 │   ├──
InputGone             exit 5   retention has removed records that are still needed │   └──
AccessDenied          exit 11  the broker does not know this user, or refuses it what it asked for
├── TransactionFailed    exit 75  leave at once and be restarted: crash-only ├── Fenced
exit 76  another process has this identity; do not restart ├── PortTaken            exit 6 ├──
ModelError           exit 7   model directory missing or not loadable ├── WeightError          exit
8   store full, file altered, URI outside the store ├── InferenceError       exit 9   the inference
server died or does not answer ├── CheckpointError      exit 10  a checkpoint cannot be written (the
disk is full) or read ├── ExportError          exit 12  an export is missing, damaged or in the way
├── TrainingDiverged     exit 13  too many steps in a row were not finite └── VersionMismatch
exit 14  an announced version was computed again and came out differently
"""

import difflib
from collections.abc import Iterable


class StreamrlError(Exception):
    exit_code = 1


class ConfigError(StreamrlError):
    exit_code = 2


class BrokerError(StreamrlError):
    exit_code = 3


class BrokerUnreachable(BrokerError):
    exit_code = 3


class TopicMissing(BrokerError):
    exit_code = 4


class InputGone(BrokerError):
    exit_code = 5


class AccessDenied(BrokerError):
    exit_code = 11


class PortTaken(StreamrlError):
    exit_code = 6


class ModelError(StreamrlError):
    exit_code = 7


class WeightError(StreamrlError):
    exit_code = 8


class InferenceError(StreamrlError):
    exit_code = 9


class CheckpointError(StreamrlError):
    exit_code = 10


class ExportError(StreamrlError):
    exit_code = 12


class TrainingDiverged(StreamrlError):
    exit_code = 13


class VersionMismatch(StreamrlError):
    exit_code = 14


class TransactionFailed(StreamrlError):
    exit_code = 75


class Fenced(StreamrlError):
    exit_code = 76


def unknown(name: str, shipped: Iterable[str]) -> str:
    """That `name` is none of these, and what may have been meant."""
    names = [shipped_name for shipped_name in shipped if shipped_name]
    near = difflib.get_close_matches(name, names, 1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"shipped: {', '.join(names)}; your own: MODULE:NAME"
    )
    return f"{name!r} is not known; {hint}"


def escaped(text: str) -> str:
    """The text with whatever would do something to a terminal written out: control characters, but
    for line ends and tabs.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
