"""A batch larger than a message may be travels as several records in one transaction; the last one
carries the digest of the whole.
"""

from __future__ import annotations

import hashlib
from typing import cast

from streamrl.log.codec import decode, encode
from streamrl.records import Batch, BatchPart

PART_BYTES = 4_000_000


def split(batch: Batch, limit_bytes: int = PART_BYTES) -> list[Batch | BatchPart]:
    """The batch itself where it is small enough, otherwise its pieces in order."""
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


class Joiner:
    """Puts the records of `batches` together again."""

    def __init__(self) -> None:
        self._pieces: list[BatchPart] = []

    def add(self, record: Batch | BatchPart) -> Batch | None:
        """The batch that this record completes, if it does. Raises ValueError when pieces are
        missing or altered.
        """
        if isinstance(record, Batch):
            return record
        if record.part == 0:
            self._pieces = []
        if record.part != len(self._pieces) or any(
            piece.number != record.number for piece in self._pieces
        ):
            pieces, self._pieces = len(self._pieces), []
            raise ValueError(
                f"batch {record.number}: piece {record.part} of {record.parts} came after {pieces} pieces"
            )
        self._pieces.append(record)
        if len(self._pieces) < record.parts:
            return None
        data, self._pieces = b"".join(piece.data for piece in self._pieces), []
        if hashlib.sha256(data).digest() != record.digest:
            raise ValueError(
                f"batch {record.number}: its {record.parts} pieces do not have the digest announced"
            )
        return cast(Batch, decode("batch/1", data))
