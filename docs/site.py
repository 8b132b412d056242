"""What the site does beside MkDocs: one page for each package from the docstrings, and GitHub's anchors.

On the site those pages stand in the place of docs/api.md, which is for readers of the repository and written by
`python docs/api.py`; both list the names of `__all__`.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src"
PACKAGES: tuple[str, ...] = (*runpy.run_path(str(DOCS / "api.py"))["MODULES"][1:], "pathspace.sequences")


def on_config(config: Any) -> Any:
    """Headings get the anchors that they have on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, separator: str) -> str:
    """GitHub's anchor of a heading: "... train my model?" is "-train-my-model"."""
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", separator)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What lies outside docs/ is no part of the site: a link to it becomes its path in the repository.

    A link to a name in api.md leads to the page of its package.
    """
    outside = r"(?:benchmarks/|README|CHANGELOG|CONTRIBUTING)[^)#]*"
    markdown = re.sub(rf"\[([^\[\]]*)\]\((?:\.\./)+({outside})[^)]*\)", r"\1 (`\2`)", markdown)
    names = (f"{package}.{name}" for package in PACKAGES for name in public_names(package))
    pages = {slug(name, "-"): f"api/{name.split('.')[1]}.md#{name}" for name in names}
    return re.sub(r"\bapi\.md#([\w-]+)", lambda link: pages[link[1]], markdown)


class Docstrings(griffe.Extension):
    """Docstrings as mkdocstrings reads them: examples as code, references by their names."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class or function."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            # the indented lines below are a block of code to Markdown, too
            text = re.sub(r"^ *\.\. code-block:: text\n\n", "", text, flags=re.M)
            obj.docstring.value = without_roles(text)


def without_roles(text: str) -> str:
    """The text with names in the place of Sphinx's references to them."""
    return re.sub(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`", r"`\1`", text)


def public_names(package: str) -> list[str]:
    """The names of a package's `__all__`, read without importing it."""
    for node in _tree(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise LookupError(f"{package} has no __all__")


def _tree(package: str) -> ast.Module:
    return ast.parse((SOURCE / package.replace(".", "/") / "__init__.py").read_text())


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every package, and let api.md list them."""
    index = ["# API", "", "`import pathspace as ps`. Each page lists the public names of a package.", ""]
    for package in PACKAGES:
        name, about = (
            package.removeprefix("pathspace."),
            without_roles(ast.get_docstring(_tree(package)) or ""),
        )
        index.append(f"* [`ps.{name}`](api/{name}.md): {about.splitlines()[0]}")
        page = [f"# ps.{name}", "", about, ""]
        for public in public_names(package):
            page += [f"::: {package}.{public}", ""]
        files.append(File.generated(config, f"api/{name}.md", content="\n".join(page)))
    files.remove(next(file for file in files if file.src_uri == "api.md"))
    files.append(File.generated(config, "api.md", content="\n".join(index) + "\n"))
    return files
