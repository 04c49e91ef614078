from functools import partial

from streamrl.extensions.advisor.timeline import Timeline


def test_actions_come_in_the_order_of_their_times_and_equal_ones_as_they_were_given():
    timeline = Timeline()
    seen = list[tuple[str, float]]()

    def note(name: str) -> None:
        seen.append((name, timeline.now_s))
        if name == "b":
            timeline.after(0.5, partial(note, "in b"))

    for name, delay_s in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("late", 9.0)):
        timeline.after(delay_s, partial(note, name))
    timeline.run(lambda: len(seen) == 4)
    assert seen == [("a", 1.0), ("b", 1.0), ("in b", 1.5), ("c", 2.0)]
