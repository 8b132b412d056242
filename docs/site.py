"""Hooks of the site: the home page from the README, GitHub's anchors, and docstrings as mkdocstrings reads them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REPOSITORY_FILE = r"(?:benchmarks/|README|CHANGELOG|CONTRIBUTING|CITATION)[^)#]*"


def on_config(config: Any) -> Any:
    """Give headings the anchors that they have on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, separator: str) -> str:
    """Return GitHub's anchor of a heading: "... train my model?" is "-train-my-model"."""
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", separator)


def on_files(files: Files, config: Any) -> Files:
    """Make the README of the repository the home page, and docs/README.md the page "All pages"."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    all_pages = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    # links of the home page start in docs/ instead of in the repository
    home = re.sub(r"\]\(docs/", "](", readme)
    files.remove(next(file for file in files if file.src_uri == "README.md"))
    files.append(File.generated(config, "index.md", content=home))
    files.append(File.generated(config, "pages.md", content=all_pages))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt links to docs/README.md, and replace those to files outside docs/ by their path in the repository."""
    folder = "../" * page.file.src_uri.count("/")
    markdown = re.sub(rf"\]\({re.escape(folder)}README\.md", f"]({folder}pages.md", markdown)
    return re.sub(rf"\[([^\[\]]*)\]\((?:\.\./)*({REPOSITORY_FILE})[^)]*\)", _named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Name the column in each cell of the table of claims: on a phone every row is shown as a list of its cells."""
    if page.file.src_uri != "claims.md":
        return html
    return re.sub(r"<table>.*?</table>", _with_labels, html, flags=re.S)


def _with_labels(table: re.Match[str]) -> str:
    text = table[0]
    labels = re.findall(r"<th[^>]*>(.*?)</th>", text, flags=re.S)
    cells = itertools.cycle(labels)
    labelled = re.sub(r"<td", lambda _: f'<td data-label="{next(cells)}"', text)
    return f'<div class="rows-as-lists">{labelled}</div>'


class Docstrings(griffe.Extension):
    """Docstrings as mkdocstrings reads them: examples as code, references by their names."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class or function."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            # the indented lines below are a block of code to Markdown, too
            text = re.sub(r"^ *\.\. code-block:: text\n\n", "", text, flags=re.M)
            obj.docstring.value = without_roles(text)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Show `**options` without its type: the docstring says which options there are."""
        for parameter in func.parameters:
            if str(parameter.annotation).startswith("Unpack["):
                parameter.annotation = None

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Let `ps.network.trace` be the function where a module of the package has the same name."""
        for package in pkg.modules.values():
            for name in map(str, package.exports or ()):
                if isinstance(package.members.get(name), griffe.Module):
                    function = loader.modules_collection[package.imports[name]]
                    package.members[name] = griffe.Alias(name, function, parent=package)


def without_roles(text: str) -> str:
    """Return the text with names in place of Sphinx's references to them."""
    return re.sub(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`", r"`\1`", text)
