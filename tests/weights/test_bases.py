from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamrl.stream.records import AdapterBase, AdapterCheck, Probe
from streamrl.system.errors import WeightError
from streamrl.weights.bases import BASE, CHECK, base_store, copy_base
from streamrl.weights.pull import pull

PROBE = Probe(tokens=np.array([1, 2], np.uint16), logprobs=np.array([-1], np.float32))


def stored(root: str) -> AdapterBase:
    store = base_store(root)
    base = store.put(BASE, lambda directory: (directory / "config.json").write_text("{}"))
    check = store.put(CHECK, lambda directory: (directory / "adapter_config.json").write_text("1"))
    return AdapterBase(**base._asdict(), check=AdapterCheck(**check._asdict(), probe=PROBE))


def test_a_copy_is_announced_where_it_lies(tmp_path: Path):
    source = f"file://{tmp_path}/parent"
    target = f"file://{tmp_path}/fork"
    base = stored(source)
    copied = copy_base(base, source, target)
    assert (copied.sha256, copied.check.sha256) == (base.sha256, base.check.sha256)
    pulled = pull(copied, target, tmp_path / "pulled")
    assert (pulled / "config.json").read_text() == "{}"
    check = pull(copied.check, target, tmp_path / "check")
    assert (check / "adapter_config.json").read_text() == "1"


def test_what_was_altered_is_not_copied(tmp_path: Path):
    source = f"file://{tmp_path}/parent"
    base = stored(source)
    Path(base.uri.removeprefix("file://"), "config.json").write_text("[]")
    with pytest.raises(WeightError, match=r"^the base of adapters at .* is not what was announced"):
        copy_base(base, source, f"file://{tmp_path}/fork")
