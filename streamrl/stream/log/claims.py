"""Claims: which process has an identity. The first record of a process in its changelog topic is
its claim, and the process with the newest claim has the identity.

A producer alone cannot tell this. The broker fences the producers of earlier processes, but an
earlier process may open another producer, which fences the newer process in turn.

A claim has two headers, whose values are ASCII. Its key is the identity, and its value is made up
by the process. No reader of records gets it (`chunks.JoiningReader`). docs/records.md describes it
for other languages.

    schema           claim/1
    streamrl.claim   identity
"""

from __future__ import annotations

import os

from streamrl.config import topology
from streamrl.stream.log.protocol import Message

CLAIM_SCHEMA = ("schema", b"claim/1")
CLAIM_HEADER = "streamrl.claim"
CHANGELOGS = (topology.JOURNAL, topology.POLICY_VERSIONS)  # kinds of topics that have claims


def new_claim(identity: str, changelog_topic: str) -> Message:
    """The claim of this process, unlike any other."""
    name = identity.encode()
    headers = (CLAIM_SCHEMA, (CLAIM_HEADER, name))
    return Message(changelog_topic, name, os.urandom(16).hex().encode(), headers)


def is_claim(message: Message) -> bool:
    """Whether the message is a claim. In topics that are no changelog there are none."""
    return (
        len(message.headers) > 1
        and message.headers[0] == CLAIM_SCHEMA
        and message.headers[1][0] == CLAIM_HEADER
        and topology.kind_of(message.topic) in CHANGELOGS
    )


def is_rival(message: Message, own: Message) -> bool:
    """Whether the message claims the identity of the claim `own` for another process."""
    return is_claim(message) and message.key == own.key and message.value != own.value
