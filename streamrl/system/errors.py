"""What can go wrong. A StreamrlError is one line for the user: what, where, and what to do. The
command prints it without a traceback, and ends with the exit code of its class.
"""

from __future__ import annotations

from streamrl.system.text import one_line


class StreamrlError(Exception):
    exit_code = 1


class ConfigError(StreamrlError):
    """The run file or an option is wrong."""

    exit_code = 2


class BrokerError(StreamrlError):
    exit_code = 3


class BrokerUnreachable(BrokerError):
    exit_code = 3


class TopicMissing(BrokerError):
    exit_code = 4


class InputGone(BrokerError):
    """Retention has deleted records that are still needed."""

    exit_code = 5


class AccessDenied(BrokerError):
    """The broker does not know this user, or refuses what it asked for."""

    exit_code = 11


class PortTaken(StreamrlError):
    exit_code = 6


class ModelError(StreamrlError):
    """A model directory is missing or cannot be loaded."""

    exit_code = 7


class WeightError(StreamrlError):
    """The weight store is full, a file is altered, or a URI is outside the store."""

    exit_code = 8


class InferenceError(StreamrlError):
    """The inference server died or does not answer."""

    exit_code = 9


class CheckpointError(StreamrlError):
    """A checkpoint cannot be written, for instance because the disk is full, or cannot be read."""

    exit_code = 10


class ExportError(StreamrlError):
    """An export is missing, damaged or in the way."""

    exit_code = 12


class TrainingDiverged(StreamrlError):
    """Nothing could be trained on in too many steps in a row."""

    exit_code = 13


class VersionMismatch(StreamrlError):
    """An announced version was computed again and came out differently."""

    exit_code = 14


class HubError(StreamrlError):
    """The Hugging Face hub has no such repository, refuses access to it, or cannot be reached."""

    exit_code = 15


class TransactionFailed(StreamrlError):
    """The process ends at once and is started again."""

    exit_code = 75


class Fenced(StreamrlError):
    """Another process has taken this identity. The process is not started again."""

    exit_code = 76

    @classmethod
    def taken_over(cls, identity: str = "") -> Fenced:
        """The error of a process whose identity is taken. A caller may not know which it is."""
        prefix = f"{identity}: " if identity else ""
        return cls(
            f"{prefix}another process with this identity has taken over; stop one of the two"
        )


def describe_error(error: BaseException, limit: int = 400) -> str:
    """An error of a library or of a user's code on one line, with its class."""
    return one_line(f"{type(error).__name__}: {error}", limit)
