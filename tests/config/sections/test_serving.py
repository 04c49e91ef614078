from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.sections.serving import Eval, EvalEnv, Inference, Pool
from streamrl.system.errors import ConfigError


def test_a_server_is_counted_through_the_pools():
    inference = Inference(replicas=2, pools={"judges": Pool(), "teachers": Pool(replicas=3)})
    assert inference.sizes == {"generation": 2, "judges": 1, "teachers": 3}
    assert [inference.place("generation", 1), inference.place("teachers", 2)] == [1, 5]
    with pytest.raises(ConfigError, match="inference.pools has no 'judge'; did you mean 'judges'"):
        inference.place("judge", 0)


def test_the_python_of_vllm_is_the_one_that_is_given():
    assert Inference(python="there/bin/python").interpreter == Path("there/bin/python")


def test_nothing_is_evaluated_without_held_out_problems():
    assert Eval(every=5).interval == 0
    assert Eval(every=5, envs={"digits": EvalEnv()}).interval == 5


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float32"),
        ({"dtype": "bfloat16", "pools": {"slow": {"dtype": "float32"}}}, "float32"),
        ({"dtype": "bfloat16", "pools": {"same": {}}}, "bfloat16"),
        ({"dtype": "bfloat16", "pools": {"judge": {"model": "M", "dtype": "float32"}}}, "bfloat16"),
    ],
)
def test_a_version_has_the_data_type_of_all_servers_of_the_policy_or_float32(
    settings: dict[str, Any], dtype: str
):
    assert Inference.model_validate(settings).weights_dtype == dtype
