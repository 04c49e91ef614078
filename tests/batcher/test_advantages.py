from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from streamrl import config
from streamrl.batcher import process
from streamrl.batcher.advantages import STAGE_OF, STAGES, normalized, stage_named, staged
from streamrl.batcher.assemble import assemble
from streamrl.buffer.advantages import ADVANTAGES, advantage_named
from streamrl.errors import ConfigError
from streamrl.records import Batch
from tests.batcher.test_process import CONFIG, arrivals, fold
from tests.build import floats, group, version_event


def test_normalized_by_hand():
    # mean 1, deviations 3, -1, -1, -1, standard deviation sqrt(12 / 4)
    np.testing.assert_allclose(normalized(floats(4, 0, 0, 0)), np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-6)


def test_equal_ones_give_none_as_does_nothing():
    assert normalized(floats(*[0.1] * 5)).tolist() == [0] * 5 and normalized(floats()).shape == (0,)


def test_reinforce_plus_plus_takes_the_batch_for_its_baseline_and_with_one_each_groups():
    """Two problems, one easy: the plain one calls every try at it good, the one with a baseline does not."""
    easy, hard = floats(1, 0.8), floats(0.2, 0)
    plain, based = (
        stage_named(STAGE_OF[name])(np.concatenate([advantage_named(name)(easy), advantage_named(name)(hard)]))
        for name in ("reinforce++", "reinforce++-baseline")
    )
    np.testing.assert_allclose(plain, np.array([0.5, 0.3, -0.3, -0.5]) / np.sqrt(0.17), rtol=1e-5)
    np.testing.assert_allclose(based, [1, -1, 1, -1], rtol=1e-5)


def test_the_batcher_adds_its_stage():
    """Advantages -1 and 1 in each of two groups; scaled by an own function, which changes nothing else."""
    events = [version_event(0), *arrivals("a", "b")]
    plain, doubled = (
        next(o.record for o in fold(events, replace(CONFIG, advantage=name)) if isinstance(o.record, Batch))
        for name in ("none", "tests.batcher.test_advantages:doubled")
    )
    assert plain.advantages.tolist() == [-1, 1, -1, 1] and doubled.advantages.tolist() == [-2, 2, -2, 2]
    assert plain.uids == doubled.uids and plain.tokens.tolist() == doubled.tokens.tolist()


def doubled(advantages: np.ndarray) -> np.ndarray:
    return advantages * np.float64(2)


def test_what_cannot_be_used_names_the_batch():
    batch = assemble([group()], 7, 7, row_count=2, max_seq_len=10)
    assert batch is not None and staged(batch, doubled).advantages.dtype == np.float32
    for stage in (lambda advantages: advantages[:1], lambda advantages: advantages / 0):
        with pytest.raises(ValueError, match="batch 7: batcher.advantage returned"), np.errstate(all="ignore"):
            staged(batch, stage)


def test_a_method_brings_the_stage_it_needs_and_a_run_file_may_choose_another():
    assert STAGE_OF.keys() < ADVANTAGES.keys() and {*STAGE_OF.values()} <= STAGES.keys()
    for chosen, expected in (({}, "none"), ({"buffer.advantage": "reinforce++"}, "normalize"), ({"batcher.advantage": "normalize"}, "normalize")):
        run = config.changed(config.parse({"run": "r", "envs": {"copy": {}}}), [f"{name}={value}" for name, value in chosen.items()])
        assert process.part(run).config.advantage == expected
    with pytest.raises(ConfigError, match=r"batcher.advantage: 'normalise' is not known; did you mean 'normalize'\?"):
        stage_named("normalise")
