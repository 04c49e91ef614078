"""`python -m tests.attacks`: a table attack | where | held, as this user and, from root, as a plain
user. Then `tests.attacks.live`. Exit code 1 if one did harm.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.attacks import live
from tests.attacks.table import attacks, harm

NOBODY = 65534


def table() -> bool:
    """Print one line an attack. Did all of them fail?"""
    found = attacks()
    width = max(len(attack.name) for attack in found)
    place = max(len(attack.where) for attack in found)
    print(f"{'':5}{'attack':{width}}  {'where':{place}}  held   (as user {os.geteuid()})")
    held = True
    for attack in found:
        with tempfile.TemporaryDirectory() as directory:
            done = harm(attack, Path(directory))
        held = held and not done
        print(
            f"{attack.review:5}{attack.name:{width}}  {attack.where:{place}} "
            f" {f'NO: {done}' if done else 'yes'}",
            flush=True,
        )
    return held


def main() -> int:
    options = argparse.ArgumentParser(prog="tests.attacks", description=__doc__)
    options.add_argument(
        "--this-user-only", action="store_true", help="not as a plain user too, where this is root"
    )
    held = table()
    if os.geteuid() == 0 and not options.parse_args().this_user_only:
        print()
        line = [sys.executable, "-m", "tests.attacks", "--this-user-only"]
        with tempfile.TemporaryDirectory() as home:
            os.chown(home, NOBODY, NOBODY)
            plain = subprocess.run(
                line,
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                env={**os.environ, "HOME": home},
                check=False,
            )
        held = held and plain.returncode == 0
    return 0 if held else 1


if __name__ == "__main__":
    code = main()
    if "--this-user-only" not in sys.argv:
        code = max(code, live.main())
    sys.exit(code)
