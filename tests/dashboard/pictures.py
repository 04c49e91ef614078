"""The pictures of docs/dashboard.md, of a dashboard that is running: `python -m tests.dashboard.pictures http://127.0.0.1:8650/ docs/images`."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Browser

from tests.dashboard.browser import DESKTOP, PHONE, chromium, page_of

SETTLE_MS = 600.0


def main(address: str, directory: Path) -> None:
    with chromium() as browser:
        for scheme in ("light", "dark"):
            take(browser, address, directory / f"dashboard-{scheme}.png", scheme, step=-1)
        take(browser, address, directory / "dashboard-phone.png", "light", PHONE)
        take(browser, address, directory / "dashboard-rollout.png", "dark", opened=True)


def take(
    browser: Browser,
    address: str,
    path: Path,
    scheme: str,
    size: tuple[int, int] = DESKTOP,
    step: int | None = None,
    opened: bool = False,
    full: bool = False,
) -> None:
    """One picture; `step`: with the slider there, -1 in the middle."""
    with page_of(browser, address, size, scheme) as (page, complaints):  # type: ignore[arg-type]
        page.wait_for_selector(".node")
        page.wait_for_selector("#rows tr[data-place]")
        if step is not None:
            page.evaluate(
                """step => {
                    const slider = document.getElementById('slider');
                    slider.value = step < 0 ? Math.round(slider.max / 2) : step;
                    slider.dispatchEvent(new Event('input'));
                }""",
                step,
            )
            page.wait_for_timeout(SETTLE_MS)
        if opened:
            page.locator("#rows tr").first.click()
            page.wait_for_selector(".tok")
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=path, full_page=full)
        print(path, path.stat().st_size, *complaints)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
