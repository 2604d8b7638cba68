"""The Chromium that tests drive. Tests that run one after the other share it: starting it costs as much as a small page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

_shared: list[Browser] = []
_processes: set[int] = set()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield the browser of :func:`shared_chromium`, or one that ends with this. Contexts that were opened in it are
    closed."""
    if not _shared:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            yield browser
            browser.close()
        return
    (browser,) = _shared
    there = list(browser.contexts)
    try:
        yield browser
    finally:
        for context in browser.contexts:
            if context not in there:
                context.close()


@contextmanager
def shared_chromium() -> Iterator[None]:
    """Let :func:`chromium` give one browser to all."""
    before = _children()
    with chromium() as browser:
        # The driver's threads for files are made when they are first needed, which would be in the middle of a test: a
        # second one when it has two files to write before the first thread reports that it is idle. So there is one,
        # from now on.
        browser._loop.set_default_executor(ThreadPoolExecutor(1))
        page = browser.new_page()
        page.screenshot(path=os.devnull, type="png")
        page.close()
        _shared.append(browser)
        _processes.update(_children() - before)
        try:
            yield
        finally:
            _shared.remove(browser)
            _processes.clear()


def shared_processes() -> set[int]:
    """Return those of our child processes that are the shared browser: its descendants come and go when it likes."""
    return set(_processes)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def page_errors(page: Page) -> list[str]:
    """Return errors that nothing on the page catches from now on, with where they come from."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"{error}\n{error.stack or ''}"))
    return errors
