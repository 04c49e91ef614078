from pathlib import Path

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]


def test_the_files_that_are_begun_first_are_there():
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []
