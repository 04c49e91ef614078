"""Names of problems and groups, which agents choose, as the run can remember them."""

from __future__ import annotations

import xxhash

from streamrl.stream.records.limits import MAX_ID

HASHED_ID = 200  # characters of a long name that are kept before its hash


def short_name(name: str) -> str:
    """The name, or its beginning and its hash where it has more characters than an id may have."""
    if len(name) <= MAX_ID:
        return name
    digest = xxhash.xxh3_128_hexdigest(name.encode("utf-8", "surrogatepass"))
    return f"{name[:HASHED_ID]}~{digest}"
