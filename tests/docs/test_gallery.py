"""Every program of the gallery has its picture on the page, small, and drawn by one command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs/gallery"
PAGE = (GALLERY / "README.md").read_text(encoding="utf-8")
PROGRAMS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "pictures")
SMALL = 60_000  # bytes
DRAWINGS = ("rescaling", "squared-network", "skeleton")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_on_the_page_with_its_picture(program: str) -> None:
    picture = ROOT / f"docs/images/gallery/{program}.svg"
    assert f"[{program}.py]({program}.py)" in PAGE
    assert re.search(rf"!\[[^]]+\]\(\.\./images/gallery/{program}\.svg\)", PAGE)
    assert picture.stat().st_size < SMALL
    assert "http" not in re.sub(
        r'"http://(?:www\.w3\.org|purl\.org|creativecommons\.org)[^"]*"', "", _body(picture)
    )


def _body(picture: Path) -> str:
    """A picture without the head that names the format."""
    text = picture.read_text(encoding="utf-8")
    return re.sub(r"<metadata>.*?</metadata>|<!DOCTYPE.*?>", "", text, flags=re.S)


def test_no_picture_is_left_of_a_program_that_is_gone() -> None:
    assert sorted(path.stem for path in ROOT.glob("docs/images/gallery/*")) == PROGRAMS


def _run(program: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(program), *arguments], check=True, env=environment, cwd=ROOT
    )


@pytest.mark.slow
def test_pictures_of_the_gallery_are_drawn_anew(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    _run(GALLERY / "pictures.py", str(tmp_path))
    assert sorted(path.stem for path in tmp_path.iterdir()) == PROGRAMS
    for path in tmp_path.iterdir():
        assert 5_000 < path.stat().st_size < SMALL, path.name


@pytest.mark.slow
def test_drawings_of_the_theory_are_drawn_anew(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _run(ROOT / "docs/images/drawings.py", str(tmp_path))
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(DRAWINGS)
    theory = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/theory/*.md"))
    assert all(f"(../images/{name}.png)" in theory for name in DRAWINGS)
