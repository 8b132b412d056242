"""The site builds without a warning and from this folder alone, and its reference has every public name."""

import importlib.util
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

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
        env=os.environ | {"http_proxy": nowhere, "https_proxy": nowhere, "NO_MKDOCS_2_WARNING": "1"},
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
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_the_site(site: Path, package: str) -> None:
    text = (site / "api" / package / "index.html").read_text(encoding="utf-8")
    names = import_module(f"pathspace.{package}").__all__
    assert [name for name in names if f'id="pathspace.{package}.{name}"' not in text] == []
    assert ":func:" not in text
    assert "<blockquote>" not in text  # an example that was read as prose


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")]:
        address = str(page.relative_to(ROOT / "docs").with_suffix("")).replace("README", "")
        assert f'href="{address.rstrip("/")}/' in home or address == "", page
