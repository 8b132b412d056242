"""The pages of `compare` and `reproduce` as a reader sees them, on a desk and on a phone."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from browser import DESK, PHONE, Browser, chromium, overflow
from experiments.conftest import TINY, asked
from pathspace.experiments.compare import Comparison, Row, compare
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.recipes import load_published
from pathspace.experiments.report import write_report
from pathspace.experiments.report.comparison import comparison_report, conclusion, parts_report
from pathspace.experiments.runner import Runs

pytestmark = pytest.mark.slow
PAGES = ["compare", "reproduce", "parts"]
TITLE = "Two <starts> of a function with a title that is longer than a phone is wide"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Real runs, with test errors by which SGD is worse from the rescaled start."""
    done = compare(asked(TINY), Runs(tmp_path_factory.mktemp("runs")))
    return replace(done, rows=tuple(map(_with_errors, done.rows)))


def _with_errors(row: Row) -> Row:
    lost = row.method == "sgd" and row.start == "rescaled"
    errors = (8.0, 8.1) if lost else (1.0, 1.0 + 0.1 * len(row.method))
    runs = zip(row.runs, errors, strict=True)
    return replace(row, runs=tuple(replace(run, test_error=error) for run, error in runs))


@pytest.fixture(scope="module")
def pages(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of the page of a comparison, of a recipe, and of a recipe of two parts."""
    folders = {name: tmp_path_factory.mktemp(name) for name in PAGES}
    configuration = Configuration("compare", TITLE, comparison.settings).as_dict()
    both = {"adding": comparison, "smnist-784": comparison}
    reports = {
        "compare": comparison_report(comparison, title=TITLE, configuration=configuration),
        "reproduce": comparison_report(
            comparison, title=TITLE, configuration=configuration, published=load_published("adding")
        ),
        "parts": parts_report(both, title=TITLE, configuration=configuration),
    }
    for name, report in reports.items():
        write_report(report, folders[name])
    return {name: (folder / "report.html").as_uri() for name, folder in folders.items()}


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_asks_for_nothing_and_complains_of_nothing(
    browser: Browser, pages: dict[str, str], name: str, size: tuple[int, int]
) -> None:
    page = browser.open(pages[name], size)
    assert overflow(page) == 0
    for button in page.locator("th button").all():
        button.click()
    assert browser.requests == [pages[name]]
    assert browser.complaints == []


@pytest.mark.parametrize("name", PAGES)
def test_the_conclusion_stands_on_top_of_a_phone(
    browser: Browser, pages: dict[str, str], name: str, comparison: Comparison
) -> None:
    page = browser.open(pages[name], PHONE)
    card = page.locator(".conclusion").first
    assert card.bounding_box()["y"] < PHONE[1] / 2
    said = [sentence.inner_text() for sentence in card.locator("p").all()]
    assert said
    if name != "parts":
        assert said == list(conclusion(comparison))


def test_the_figure_scrolls_on_a_phone_and_fits_a_desk(
    browser: Browser, pages: dict[str, str]
) -> None:
    for size, fits in ((PHONE, False), (DESK, True)):
        page = browser.open(pages["compare"], size)
        figure = page.locator(".figure").first
        assert figure.locator("svg").count() == 1
        assert figure.evaluate("box => box.scrollWidth <= box.clientWidth") == fits


def test_the_table_scrolls_on_a_phone_and_keeps_the_names_in_sight(
    browser: Browser, pages: dict[str, str]
) -> None:
    page = browser.open(pages["reproduce"], PHONE)
    table = page.locator(".scroll:has(> table.sortable)").first
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    first = table.locator("tbody td").first
    before = first.bounding_box()["x"]
    table.evaluate("box => { box.scrollLeft = box.scrollWidth }")
    assert table.evaluate("box => box.scrollLeft") > 0
    assert first.bounding_box()["x"] == before
    last = table.locator("tbody tr").first.locator("td").last.bounding_box()
    assert last["x"] + last["width"] <= PHONE[0]
    names = table.locator("tbody td:first-child > span").all()
    lines = [name.evaluate("name => name.getClientRects().length") for name in names]
    words = [len(re.split(r"[ -]", name.text_content())) for name in names]
    # no word is cut in two
    assert all(line <= count for line, count in zip(lines, words, strict=True))


def _column(page: Any, title: str) -> list[str]:
    table = page.locator("table.sortable").first
    heads = [head.text_content() for head in table.locator("th").all()]
    number = next(i for i, head in enumerate(heads) if head.startswith(title))
    return [row.locator("td").nth(number).text_content() for row in table.locator("tbody tr").all()]


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_click_on_a_heading_sorts_by_its_numbers(
    browser: Browser, pages: dict[str, str], size: tuple[int, int]
) -> None:
    page = browser.open(pages["compare"], size)
    before = _column(page, "test")
    head = page.locator("th button", has_text="test").first
    head.click()
    values = [float(cell.split(" ± ")[0]) for cell in _column(page, "test")]
    assert values == sorted(values)
    assert len(set(values)) > 1
    assert page.locator('th[aria-sort="ascending"]').count() == 1
    # every row says by itself which method it is of
    assert all(name.is_visible() for name in page.locator("tbody td:first-child > span").all())
    head.click()
    assert [float(cell.split(" ± ")[0]) for cell in _column(page, "test")] == values[::-1]
    head.click()
    assert _column(page, "test") == before


def test_same_and_good_have_colours_and_signs_of_their_own(
    browser: Browser, pages: dict[str, str]
) -> None:
    page = browser.open(pages["compare"])
    shown = page.evaluate(
        """Object.fromEntries([...document.querySelectorAll("tbody .pill")].map(pill => [
             pill.classList[1], [getComputedStyle(pill).backgroundColor, getComputedStyle(pill).color,
                                 getComputedStyle(pill, "::before").content, pill.textContent]]))"""
    )
    assert set(shown) == {"same", "differs", "good", "bad"}
    grounds, inks = ([value[i] for value in shown.values()] for i in (0, 1))
    assert len(set(grounds)) == len(set(inks)) == 4
    # and to whoever sees no colours
    assert shown["good"][2] != shown["bad"][2]
    assert "none" not in (shown["good"][2], shown["bad"][2])
    assert shown["same"][3] in ("yes", "0.0")
    assert shown["differs"][3] not in ("yes", "0.0")
    explained = page.locator(".legend .pill").evaluate_all(
        "pills => pills.map(pill => pill.classList[1])"
    )
    assert sorted(explained) == sorted(shown)


def test_words_stand_out_from_their_ground(browser: Browser, pages: dict[str, str]) -> None:
    """A contrast of 4.5, as WCAG 2 asks of text."""
    page = browser.open(pages["compare"])
    pairs = page.evaluate(
        """[...document.querySelectorAll("tbody .pill, p, li")].map(element => {
             let ground = element;
             const style = getComputedStyle(element), clear = "rgba(0, 0, 0, 0)";
             while (getComputedStyle(ground).backgroundColor === clear) ground = ground.parentElement;
             return [style.color, getComputedStyle(ground).backgroundColor];
           })"""
    )
    assert min(_contrast(ink, ground) for ink, ground in pairs) >= 4.5


def _contrast(*colours: str) -> float:
    """(L1 + 0.05) / (L2 + 0.05) of the relative luminances L1 >= L2 of two colours of sRGB."""
    luminances = []
    for colour in colours:
        values = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


@pytest.mark.parametrize("name", PAGES)
def test_the_configuration_is_folded_and_opens(
    browser: Browser, pages: dict[str, str], name: str
) -> None:
    page = browser.open(pages[name], PHONE)
    configuration = page.locator("details pre")
    assert not configuration.is_visible()
    page.locator("summary").click()
    assert configuration.is_visible()
    assert json.loads(configuration.inner_text())["command"] == "compare"
    assert overflow(page) == 0
