"""Headless Chromium for tests of pages: it reaches no network, and what a page asks for or complains of is kept."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PHONE, DESK = (390, 844), (1280, 900)
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; skips the test, with the reason, where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs the extra tools: playwright"
    )
    program = os.environ.get("PATHSPACE_CHROMIUM") or next(
        filter(None, map(shutil.which, PROGRAMS)), None
    )
    if program is None:
        pytest.skip(
            "needs Chromium on the PATH, or its place in PATHSPACE_CHROMIUM: apt-get install chromium"
        )
    # no name is resolved, so that nothing leaves the machine, whatever a page asks for
    options = [
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    with playwright.sync_playwright() as driver:
        program = driver.chromium.launch(executable_path=program, args=options)
        yield Browser(program)
        program.close()


class Browser:
    """Opens pages, and remembers what went wrong on them.

    Attributes:
        complaints: what pages wrote to the console, errors of their scripts, and answers that say
            there is nothing.
        requests: addresses that pages asked for.
    """

    def __init__(self, program: Any) -> None:
        self._program, self._pages = program, []
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, address: str, size: tuple[int, int] = DESK) -> Any:
        """Return a page of Playwright; the one before is closed, and what was said of it forgotten."""
        for page in self._pages:
            page.close()
        self.complaints, self.requests = [], []
        page = self._program.new_page(viewport={"width": size[0], "height": size[1]})
        self._pages = [page]
        page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("response", lambda answer: self._heard(answer.status, answer.url))
        page.goto(address)
        return page

    def _heard(self, status: int, address: str) -> None:
        if status >= 400:
            self.complaints.append(f"{status}: {address}")


def overflow(page: Any) -> int:
    """How many pixels the page as a whole is wider than the screen."""
    return page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine alone, and give the address of its root."""
    handler = functools.partial(_Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass
