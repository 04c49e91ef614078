"""Loads the reference that a batch is measured from. It may be a version that the learner has yet
to announce.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from pathlib import Path

from streamrl.config.run_file import RunFile
from streamrl.learner.reference import ReferenceModel, static_reference_dir
from streamrl.stream.log.protocol import Log
from streamrl.weights.announcements import wait_for_version
from streamrl.weights.pull import pull

logger = logging.getLogger(__name__)


def ensure_reference(
    run: RunFile, log: Log, reference: ReferenceModel, number: int, stop: threading.Event
) -> bool:
    """Load the reference of batch `number`, after waiting for its version if necessary. False if
    `stop` is set first.
    """
    wanted = reference.version_to_load(number)
    if wanted is None:
        return True
    directory = static_reference_dir(run, wanted)
    if directory is not None:
        reference.load(wanted, directory)
        return True
    announced = wait_for_version(log, run.learner.name, wanted, stop)
    if announced is None:
        return False
    with tempfile.TemporaryDirectory() as copied:
        reference.load(wanted, pull(announced, run.store, Path(copied) / "reference", link=True))
    logger.info("from batch %d on the reference is version %d", number, wanted)
    return True
