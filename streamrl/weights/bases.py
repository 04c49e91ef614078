"""Where a run's weight store has the base of its adapters, and the random adapter that servers are
checked with.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from streamrl.stream.records import AdapterBase
from streamrl.weights.manifest import MANIFEST, StoredWeights
from streamrl.weights.pull import pull
from streamrl.weights.store import Store

DIRECTORY = "_base"  # No learner can have this name.
BASE = 0  # The numbers that base and check have in their store, as versions have theirs.
CHECK = 1


def base_store(root: str) -> Store:
    """The store of the base. `root`: the URI of the run's store."""
    return Store(f"{root}/{DIRECTORY}")


def copy_base(base: AdapterBase, source: str, target: str) -> AdapterBase:
    """Copy base and check from one run's store to another's, and verify them on the way. Returns
    the record of the copies. Raises WeightError.
    """
    store = base_store(target)
    copied = store.put(BASE, partial(_pull_files, base, source), base.size_bytes)
    check = store.put(CHECK, partial(_pull_files, base.check, source))
    return msgspec.structs.replace(
        base, uri=copied.uri, check=msgspec.structs.replace(base.check, uri=check.uri)
    )


def _pull_files(stored: StoredWeights, source: str, directory: Path) -> None:
    """Pull without the manifest, which the store writes again."""
    pull(stored, source, directory)
    (directory / MANIFEST).unlink()
