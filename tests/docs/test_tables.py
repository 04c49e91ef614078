"""Tables of the pages that repeat what the code decides say what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml

from docs.hooks import settings
from streamrl.config import choices, topology
from streamrl.config.presets import PRESETS, PRETRAINED
from streamrl.config.run_file import load, parse
from streamrl.config.sections.batches import Buffer
from streamrl.config.sections.learner import Kl, Learner
from streamrl.config.topology import Role, roles
from streamrl.envs.catalog import ENVS, REWARDS
from streamrl.stream.log import topics
from tests.docs.blocks import ROOT

# Each part has these.
OF_EVERY_PART = {topology.JOURNAL, topology.METRICS, topology.DEAD_LETTERS}


def rows(page: str, header: str) -> Iterator[list[str]]:
    """The cells of each row of the table that begins with the line `header`."""
    lines = (ROOT / page).read_text().splitlines()
    assert header in lines, f"{page} has no table that begins with {header}"
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def kinds_in(cell: str) -> set[str]:
    """The kinds of topics that a cell names, such as `rollouts`, or "its own journals"."""
    words = set(re.findall(r"[a-z]+(?:-[a-z]+)*", cell.replace("journals", "journal")))
    return words & set(topics.kinds())


# ---- choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("| name | A_i | source |", [*choices.ADVANTAGES]),
        ("| name | loss | averaged over | source |", [*choices.LOSSES]),
    ],
)
def test_the_page_of_losses_has_every_name(header: str, named: list[str]):
    on_page = [cells[0].strip("`") for cells in rows("docs/losses.md", header)]
    assert on_page == named, (
        f"the table {header!r} of docs/losses.md has other rows than streamrl/config/choices.py"
        " has names, or another order"
    )


def test_the_page_of_losses_says_how_each_is_averaged():
    for cells in rows("docs/losses.md", "| name | loss | averaged over | source |"):
        name = cells[0].strip("`")
        assert name in choices.AVERAGE_OF, f"docs/losses.md: no loss is called {name}"
        assert cells[2] == choices.AVERAGE_OF[name], f"docs/losses.md: average of {name}"


@pytest.mark.parametrize(
    ("section", "setting", "named"),
    [
        (Buffer, "advantage", choices.ADVANTAGES),
        (Learner, "loss", choices.LOSSES),
        (Kl, "estimator", choices.DIVERGENCES),
        (Learner, "preset", PRESETS),
    ],
)
def test_the_comment_of_a_setting_has_every_name(section: type, setting: str, named: list[str]):
    said = settings.comments(section)[setting]
    words = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*(?:\+\+[a-z-]*)?", said))
    missing = [name for name in named if name not in words]
    assert missing == [], (
        f"name these in the comment above {section.__name__}.{setting} in"
        f" streamrl/config/sections/: {', '.join(missing)}"
    )


def test_the_table_of_presets_is_in_the_words_of_a_run_file():
    rows = settings.presets().splitlines()[2:]
    assert len(rows) == len(PRESETS)
    assert "`learner.clip_epsilon: 0.2`" in rows[0] and "normalize_advantages: false`" in rows[0]


def test_the_page_of_models_has_the_defaults_of_a_pretrained_one():
    table = rows("docs/models.md", "| setting | default with `model.path` |")
    on_page = {cells[0].strip("`"): yaml.safe_load(cells[1]) for cells in table}
    assert on_page == PRETRAINED, "docs/models.md and streamrl/config/presets.py differ"


def test_the_example_of_architecture_is_the_quickstart():
    run = load(ROOT / "deploy/runs/quickstart.yaml")
    text = " ".join((ROOT / "docs/architecture.md").read_text().split())
    version = 12
    built = version + run.batcher.lookahead
    number = built + 1
    tokens = run.envs["copy-digits"].fraction * run.batcher.total_token_budget
    last = version + run.buffer.max_age
    for part in (
        f"Version {version} is the newest, and batch {built} is built already",
        f"copy-digits may have {tokens:,.0f} tokens in flight",
        f"`batches`: batch {number};",
        f"`policy-versions`: version {number + 1}, with a hash",
        f"batch {last} would still have taken it, at age {run.buffer.max_age}",
        f"Batch {last + 1} would not",
    ):
        assert part in text, f"docs/architecture.md: {part!r} is not in the example"


def test_the_page_of_envs_names_every_env_and_reward():
    page = (ROOT / "docs" / "add-an-env.md").read_text()
    missing = [name for name in (*ENVS, *REWARDS) if f"`{name}`" not in page]
    assert missing == [], f"docs/add-an-env.md: add to its tables {', '.join(missing)}"


# ---- roles and topics ----------------------------------------------------------------------------


@pytest.mark.parametrize("role", roles(), ids=lambda role: role.name)
def test_the_table_of_users_is_that_of_the_roles(role: Role):
    users = {
        cells[0].strip("`"): cells for cells in rows("SECURITY.md", "| user | reads | writes |")
    }
    user = f"<run>.{role.name}-<name>" if role.is_per_env else f"<run>.{role.name}"
    assert user in users, f"SECURITY.md: add a row for {user}"
    _, reads, writes = users[user]
    if not reads.startswith("all of the run"):
        expected = {kind for kind in topics.kinds() if role.reads(kind)}
        assert kinds_in(reads) == expected, f"SECURITY.md: what {user} reads"
    assert kinds_in(writes) == set(role.produces), f"SECURITY.md: what {user} writes"


@pytest.mark.parametrize("role", roles(), ids=lambda role: role.name)
def test_the_table_of_topics_has_every_writer_and_reader(role: Role):
    """Others may stand there too, such as the audit."""
    for topic, _, _, writers, readers in rows(
        "docs/records.md", "| topic | key | record | written by | read by |"
    ):
        kind = topology.kind_of(topic.strip("`"))
        if kind in OF_EVERY_PART:
            continue
        name = re.compile(rf"\b{role.name}s?\b")
        if kind in role.produces:
            assert name.search(writers), f"docs/records.md: {role.name} writes {topic}"
        if kind in role.consumes:
            assert name.search(readers), f"docs/records.md: {role.name} reads {topic}"


def test_the_number_of_topics_is_that_of_the_plan():
    sizing = rows("docs/operations.md", "| | formula | value |")
    (formula,) = (cells[1] for cells in sizing if cells[0].startswith("topics, and"))
    per_env, fixed = (int(number) for number in re.findall(r"\d+", formula))
    planned: list[int] = []
    for count in (1, 2):
        envs = {f"env-{i}": {"kind": "dataset"} for i in range(count)}
        planned.append(len(topics.plan(parse({"run": "r", "envs": envs}))))
    each = planned[1] - planned[0]
    rest = planned[0] - each
    assert (per_env, fixed) == (each, rest), (
        f"docs/operations.md, number of topics: write {each} E + {rest}, and the value beside it"
    )
