from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.system.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "deploy" / "runs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "placement={learner: {nodes: ['gpu1; reboot']}, inference: {}}",
            r"placement\.learner\.nodes: 'gpu1; reboot' is not a name of letters, digits",
        ),
        (
            "inference.host=0.0.0.0",
            "inference.host 0.0.0.0 can be reached from other machines: set inference.api_key",
        ),
    ],
)
def test_what_cannot_work_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [override])
