"""The site builds without a warning and from this folder alone, and its reference has every public name."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from browser import DESK, PHONE, Browser, chromium, overflow, served

ROOT = Path(__file__).parents[2]
PACKAGES = ("network", "rescaling", "paths", "metrics", "optim", "nn", "sequences")
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in NEEDED if not _is_installed(name)]
    if missing:
        pytest.skip(f"needs the extra docs: {', '.join(missing)} not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    nowhere = "http://127.0.0.1:9"  # whoever asks the network gets no answer
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ
        | {"http_proxy": nowhere, "https_proxy": nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _pages(site: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


@pytest.mark.slow
def test_the_site_builds_and_nothing_on_it_comes_from_elsewhere(site: Path) -> None:
    pages = _pages(site)
    assert len(pages) > 30
    for path, text in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]* rel=\"?stylesheet\"?[^>]* href=\"?([^\" >]+)", text)
        loaded += re.findall(
            r"<link[^>]* href=\"?([^\" >]+)\"?[^>]* rel=\"?(?:stylesheet|icon|preconnect)", text
        )
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], path


@pytest.mark.slow
def test_a_page_has_one_title(site: Path) -> None:
    """A line that begins with # by accident becomes another."""
    titles = {path: len(re.findall(r"<h1[ >]", text)) for path, text in _pages(site).items()}
    assert [path for path, count in titles.items() if count != 1] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_the_site(site: Path, package: str) -> None:
    text = (site / "api" / package / "index.html").read_text(encoding="utf-8")
    names = import_module(f"pathspace.{package}").__all__
    assert [name for name in names if f'id="pathspace.{package}.{name}"' not in text] == []
    # the function itself, not the module of the same name with the function in it
    assert [name for name in names if f'id="pathspace.{package}.{name}.{name}"' in text] == []
    assert not re.search(r":func:|\.\. [\w-]+::", text)  # what Sphinx reads, and Markdown does not
    assert "<blockquote>" not in text  # an example that was read as prose
    assert "Unpack" not in text  # a type of keywords that says nothing to a reader


@pytest.fixture(scope="module")
def root(site: Path) -> Iterator[str]:
    with served(site) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_every_page_is_shown_whole_without_a_complaint_and_without_the_network(
    site: Path, root: str, browser: Browser, size: tuple[int, int]
) -> None:
    addresses = [str(path.parent.relative_to(site)) for path in site.rglob("index.html")]
    assert len(addresses) > 30
    for address in addresses:
        page = browser.open(f"{root}{address}/" if address != "." else root, size)
        assert browser.complaints == [], address
        assert not [asked for asked in browser.requests if not asked.startswith(root)], address
        assert overflow(page) == 0, address
        pictures = page.locator("article img")
        assert all(
            pictures.evaluate_all("images => images.map(image => image.naturalWidth > 0)")
        ), address


@pytest.mark.slow
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("PathMuon", "api/optim/#pathspace.optim.PathMuon"),
        ("rescale_", "api/rescaling/#pathspace.rescaling.rescale_"),
    ],
)
def test_the_search_finds_a_name_by_its_last_part_and_leads_there(
    root: str, browser: Browser, words: str, found: str, size: tuple[int, int]
) -> None:
    page = browser.open(root, size)
    if size == PHONE:
        page.locator("label.md-header__button[for=__search]").click()
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)
    link = page.locator(f'.md-search-result__link[href$="{found}"]')
    link.wait_for()
    places = page.locator(".md-search-result__link").evaluate_all(
        "links => links.map(link => link.href)"
    )
    assert places.index(root + found) < 3
    link.click()
    page.wait_for_url(f"{root}{found}*")
    assert browser.complaints == []
    assert not [asked for asked in browser.requests if not asked.startswith(root)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"),
    [("install", "#install"), ("anomaly", "sequences/"), ("tensorboard", "diagnosing/")],
)
def test_the_search_finds_the_page_for_a_task(
    root: str, browser: Browser, words: str, found: str
) -> None:
    page = browser.open(root)
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)
    page.locator(f'.md-search-result__link[href*="{found}"]').first.wait_for()


@pytest.mark.slow
def test_a_page_is_read_in_the_dark_and_the_choice_is_kept(root: str, browser: Browser) -> None:
    page = browser.open(root)
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert page.evaluate(scheme) == "default"
    page.locator("form.md-header__option label:visible").click()
    assert page.evaluate(scheme) == "slate"
    page.goto(f"{root}tutorial/")
    assert page.evaluate(scheme) == "slate"
    assert browser.complaints == []
