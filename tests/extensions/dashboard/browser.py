"""Debian's Chromium without a screen, driven by Playwright; what the page complains of is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.waiting import patience

QUIET = (  # nothing of its own goes anywhere
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = (1280, 900)
PHONE = (390, 844)
PATIENCE_MS = patience(60_000.0)


@contextmanager
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "there is no chromium; `make .streamrl/.programs` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(
    browser: Browser,
    address: str,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
    scale: float = 1.0,
) -> Iterator[tuple[Page, list[str]]]:
    """The page, and everything that its console and its scripts have complained of."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        device_scale_factor=scale,
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints = list[str]()
    page.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss())
    )
    try:
        page.goto(address)
        yield page, complaints
    finally:
        context.close()
