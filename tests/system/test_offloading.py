"""What runs in the event loop, and what in its other thread."""

from __future__ import annotations

import asyncio
import threading

from streamrl.system.offloading import INLINE_BYTES, Offloader


async def test_what_is_small_runs_in_the_event_loop():
    offloader = Offloader()
    own = threading.current_thread()
    assert await offloader.run("a", INLINE_BYTES, threading.current_thread) is own
    assert await offloader.run("a", INLINE_BYTES + 1, threading.current_thread) is not own


async def test_an_owner_has_one_call_in_the_thread_and_others_do_not_wait_for_all_of_its():
    offloader = Offloader()
    began = list[str]()
    first_may_end = threading.Event()

    def work(name: str) -> str:
        began.append(name)
        if name == "a0":
            assert first_may_end.wait(60)
        return name

    async def asked(owner: str, name: str) -> str:
        return await offloader.run(owner, INLINE_BYTES + 1, work, name)

    tasks = [asyncio.create_task(asked("a", f"a{number}")) for number in range(4)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(asked("b", "b0")))
    await asyncio.sleep(0)
    first_may_end.set()
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "a3", "b0"]
    assert began.index("b0") == 1
