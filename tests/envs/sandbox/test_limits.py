from __future__ import annotations

import pytest

from streamrl.envs.sandbox import limits


def test_the_filter_by_hand():
    code = limits.seccomp_program(7, 0)
    lines = [code[i : i + 8].hex() for i in range(0, len(code), 8)]
    # load the machine; is it 7? otherwise kill
    assert lines[:3] == ["2000000004000000", "1500010007000000", "0600000000000080"]
    # is it call 0, read? then it is allowed
    assert lines[6:8] == ["1500000100000000", "060000000000ff7f"]
    assert lines[-1] == "060000000d000500"  # anything else is EACCES
    assert (
        max(number for both in limits.CALLS.values() for number in both if number is not None) < 450
    )


@pytest.mark.parametrize(
    ("machine", "landlock", "allow_reading", "says"),
    [
        ("x86_64", 1, False, ""),
        ("x86_64", 0, True, ""),
        ("x86_64", 0, False, "this kernel has no Landlock"),
        ("vax", 1, True, "there is no sandbox for vax"),
    ],
)
def test_a_machine_that_cannot_confine_is_refused_before_anything_runs(
    machine: str, landlock: int, allow_reading: bool, says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(limits, "landlock_abi", lambda: landlock)
    if not says:
        limits.require_sandbox(allow_reading)
        return
    with pytest.raises(limits.NoSandbox, match=says):
        limits.require_sandbox(allow_reading)
