import math

from streamrl.run.monitoring.cells import clock, number, percent


def test_clock():
    assert [clock(s) for s in (None, math.inf, math.nan, 5, 75, 3_600)] == [
        "–",
        "–",
        "–",
        "0:05",
        "1:15",
        "1:00:00",
    ]


def test_what_is_not_known_is_a_dash():
    assert number(0.25, ".1f") == "0.2" and percent(0.125) == "12.5 %"
    assert number(None, ".1f") == percent(None) == "–" and percent(None, "-") == "-"
