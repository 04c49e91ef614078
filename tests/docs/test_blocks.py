"""Every block of code in README, SECURITY and docs/ is run, or tagged with what it needs and
counted.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from streamrl.config.run_file import RunFile
from tests.docs import blocks as pages
from tests.docs import run as runs
from tests.docs.blocks import PAGES, RUNNERS, TAGS, Block, all_blocks, blocks
from tests.support.waiting import patience

# how many blocks have which tag: change it with the pages
TAGGED = {"live run": 14, "learner": 6, "torch": 1, "cluster": 9, "minutes": 5, "gpu": 2}


@pytest.fixture(scope="module")
def quickstart(broker: str) -> Iterator[RunFile]:
    """The run that the pages speak of, on the tests' broker; it, and what pages make of it, is gone
    afterwards.
    """
    run = runs.make(broker)
    admin = AdminClient({"bootstrap.servers": broker})
    before = set(admin.list_topics(timeout=patience(20)).topics)
    of_others = {topic for topic in before if not topic.startswith(f"{run.run}.")}
    yield run
    made = sorted(
        set(admin.list_topics(timeout=patience(20)).topics)
        - of_others
        - {"__consumer_offsets", "__transaction_state"}
    )
    for future in admin.delete_topics(made).values():
        future.result(timeout=patience(20))


@pytest.fixture
def directory(
    quickstart: RunFile, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    runs.place(quickstart, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMRL_KAFKA", broker)
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    yield tmp_path
    # commands set their own, and here they are called in this process
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, directory: Path):
    untagged = [block for block in blocks(page) if block.runs]
    for block in untagged:
        pages.run(block, directory)


def test_every_block_has_a_language_that_is_run_or_a_known_tag():
    for block in all_blocks():
        assert block.language, f"{block}: an indented block; make it a fenced one with a language"
        assert block.language in {*RUNNERS, "text"}, (
            f"{block}: nobody runs {block.language}; there are {', '.join(RUNNERS)}, and text for"
            " output"
        )
        assert not block.needs or block.needs in TAGS, (
            f"{block}: no tag {block.needs!r}; there are {', '.join(TAGS)}"
        )


def test_what_is_not_run_is_counted():
    tagged = [block for block in all_blocks() if block.needs]
    assert Counter(block.needs for block in tagged) == TAGGED, "\n".join(
        f"{block.needs}: {block}" for block in tagged
    )
    assert sum(block.runs for block in all_blocks()) > len(tagged)


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_only_named_exist(page: str):
    assert [
        (words, problem) for words in pages.mentions(page) if (problem := pages.objection(words))
    ] == []


# ---- the collector itself ------------------------------------------------------------------------

PAGE = """
<!-- needs: cluster -->
```sh
streamrl up
```

<!-- file: a.py --><!-- exit: 3 -->
```python
exit(3)
```

<!-- needs: cluster -->
words between the comment and the block

- in a list

  ```json
  {"a": 1}
  ```

    indented
"""


def test_blocks_are_found_with_what_is_said_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "p.md").write_text(PAGE.replace("    indented", "words\n\n    indented"))
    assert blocks("p.md") == [
        Block("p.md", 3, "sh", "streamrl up\n", needs="cluster"),
        Block("p.md", 8, "python", "exit(3)\n", file="a.py", exit=3),
        Block("p.md", 17, "json", '{"a": 1}\n'),
        Block("p.md", 23, "", "indented\n"),
    ]


def test_commands_are_split_as_a_shell_does():
    block = Block("p", 1, "sh", "# first\na 'b c' \\\n  d   # behind\n\nX=1 Y= e Z=2 > f\n")
    assert pages.commands(block) == [
        (["a", "b c", "d"], {}, ""),
        (["e", "Z=2"], {"X": "1", "Y": ""}, "f"),
    ]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("streamrl topics apply RUN.yaml", ""),
        ("streamrl COMMAND --help", ""),
        ("streamrl topics appply RUN.yaml", "no command appply"),
        ("streamrl env RUN.yaml name --replicca 1", "no option --replicca"),
        ("make quickstart", ""),
        ("make quickstrat", "no target quickstrat"),
    ],
)
def test_a_command_that_is_not_there_is_found(command: str, problem: str):
    assert pages.objection(command.split()) == problem


@pytest.mark.parametrize(
    "block",
    [
        Block("p", 1, "sh", "streamrl topics plan nowhere.yaml"),
        Block("p", 1, "sh", "false"),
        Block("p", 1, "python", "exit(2)"),
        Block("p", 1, "python", "", exit=1),
        Block("p", 1, "yaml", "learner: {los: ppo}"),
        Block("p", 1, "json", "{"),
        Block("p", 1, "toml", "a = "),
        Block("p", 1, "sql", "SELECT 1 WHERE false"),
    ],
)
def test_a_block_that_is_wrong_fails(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r".") as raised:
        pages.run(block, tmp_path)
    assert not isinstance(raised.value, KeyError) and os.getcwd() == str(tmp_path)
