"""The pictures of docs/dashboard.md, of a dashboard that is running: `python -m
tests.extensions.dashboard.pictures http://127.0.0.1:8650/ docs/images`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser

from tests.extensions.dashboard.browser import DESKTOP, PHONE, chromium, page_of

SETTLE_MS = 600.0


def main(address: str, directory: Path) -> None:
    with chromium() as browser:
        take(browser, address, directory / "dashboard-light.png", "light", step=-1)
        take(browser, address, directory / "dashboard-dark.png", "dark", at="#by-env")
        take(
            browser, address, directory / "dashboard-phone.png", "light", PHONE, step=-1, at=".card"
        )
        take(browser, address, directory / "dashboard-rollout.png", "light", step=-1, opened=True)


def take(
    browser: Browser,
    address: str,
    path: Path,
    scheme: Literal["light", "dark"],
    size: tuple[int, int] = DESKTOP,
    step: int | None = None,
    at: str = "",
    opened: bool = False,
    full: bool = False,
) -> None:
    """One picture; `step`: with the slider there, -1 in the middle. `at`: scrolled to. `opened`:
    with the rollout that earned least.
    """
    with page_of(browser, address, size, scheme) as (page, complaints):
        page.wait_for_selector(".node")
        page.wait_for_selector("#rows tr[data-place]")
        if step is not None:
            page.locator("#slider").fill(
                str(
                    page.evaluate("Math.round(document.getElementById('slider').max / 2)")
                    if step < 0
                    else step
                )
            )
            page.wait_for_timeout(SETTLE_MS)
        if at:
            page.evaluate(
                "at => scrollTo(0,"
                " document.querySelector(at).closest('.card').getBoundingClientRect().top + scrollY"
                " - 60)",
                at,
            )
        if opened:
            page.locator("#filters [name=fate]").select_option("batched")
            page.locator("#filters [name=sort]").select_option("reward-low")
            page.wait_for_timeout(SETTLE_MS)
            page.locator("#rows tr").first.click()
            page.wait_for_selector(".tok")
            page.locator(".turn.assistant .tok").first.hover()
        page.evaluate("document.activeElement.blur()")  # no ring around the slider
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=path, full_page=full)
        print(path, path.stat().st_size, *complaints)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
