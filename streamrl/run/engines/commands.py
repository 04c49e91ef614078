"""Commands of an engine, such as kubectl and sbatch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from streamrl.system.errors import StreamrlError


def output(command: Sequence[str], text: str | None = None, hint: str = "") -> str:
    """What a command prints, given `text` as its input. Raises StreamrlError with what it complains
    of, or with the `hint` where it is not installed.

    It runs in a session of its own, since Ctrl-C in the terminal would otherwise end it in the
    middle: a part of what it was to start would be started, and nothing would know of it.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=True,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise StreamrlError(f"{name} is not installed here{hint}") from None
    except subprocess.CalledProcessError as error:
        raise StreamrlError(f"{name}: {error.stderr.strip() or error.returncode}") from None
    return done.stdout
