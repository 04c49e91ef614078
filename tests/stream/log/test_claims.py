"""Claims are for the writers of an identity, and no reader of records gets them."""

from __future__ import annotations

import pytest

from streamrl.stream.log.claims import is_claim, is_rival, new_claim
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message
from streamrl.stream.log.reading import read

OWN = new_claim("a", "journal.a")


def test_a_claim_is_of_one_identity_and_of_one_process():
    assert (OWN.topic, OWN.key) == ("journal.a", b"a")
    assert OWN.headers == (("schema", b"claim/1"), ("streamrl.claim", b"a"))
    assert not is_rival(OWN, OWN)
    assert is_rival(new_claim("a", "journal.a"), OWN)
    assert not is_rival(new_claim("b", "journal.a"), OWN)
    assert not is_rival(Message("journal.a", b"a", b"an entry"), OWN)


@pytest.mark.parametrize(("topic", "is_one"), [("policy-versions", True), ("rollouts.a", False)])
def test_only_changelogs_have_claims(topic: str, is_one: bool):
    """What an env writes to another topic in the form of a claim is a record like any other, and
    becomes a dead letter.
    """
    assert is_claim(new_claim("a", topic)) is is_one


def test_a_reader_of_records_moves_past_claims():
    log = MemoryLog({"journal.a": 1})
    record = Message("journal.a", b"a", b"v", (("schema", b"x/1"),))
    log.writer("a").commit([OWN, record, new_claim("a", "journal.a")])
    assert [message.offset for message in read(log, "journal.a", 0)] == [1]
    assert [message.offset for message in read(log, "journal.a", 0, whole=False)] == [0, 1, 2]
    reader = log.reader({("journal.a", 0): 0})
    assert [message.value for message in reader.poll(10, 0.0)] == [b"v"]
    assert reader.position("journal.a", 0) == 4
