"""How batches were written before `rules_version` 2: one larger than 4 MB as several BatchParts.

Today a batch is one record, and the log cuts it (`log/chunks.py`, which also reads these parts).
The code stays because the outputs of a recorded run must come out again as they were.
"""

from __future__ import annotations

import hashlib

from streamrl.log.codec import encode
from streamrl.records import Batch, BatchPart

PART_BYTES = 4_000_000


def split_batch(batch: Batch, limit_bytes: int = PART_BYTES) -> list[Batch | BatchPart]:
    """The batch itself where it is small enough, otherwise its parts in order. The last part has
    the digest of the whole.
    """
    arrays = (batch.prompts, batch.tokens, batch.policy_logprobs, batch.lengths, batch.advantages)
    by_token = 0 if batch.token_advantages is None else batch.token_advantages.nbytes
    if by_token + sum(array.nbytes for array in arrays) + 100 * len(batch.uids) < limit_bytes:
        return [batch]
    data = encode(batch)
    pieces = [data[i : i + limit_bytes] for i in range(0, len(data), limit_bytes)]
    digests = [b""] * (len(pieces) - 1) + [hashlib.sha256(data).digest()]
    return [
        BatchPart(number=batch.number, part=i, parts=len(pieces), data=p, digest=d)
        for i, (p, d) in enumerate(zip(pieces, digests, strict=True))
    ]
