"""Print how dense the source is: syntax nodes a line, and functions with many branches, by folder.

Blank lines, comments and docstrings are not counted as lines. The complexity of a function is 1
plus its branches: `if`, `for`, `while`, `except` and `case`, every further operand of `and` and
`or`, conditional expressions, and every `for` and `if` of a comprehension. Ruff's C901 counts
statements only, so it finds fewer branches.

    python benchmarks/readability.py
    python benchmarks/readability.py --limit 15 src/pathspace/network
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "pathspace"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.IfExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Folder:
    """Sums over the files of a folder."""

    nodes: int = 0
    lines: int = 0
    functions: int = 0
    complex_functions: list[tuple[int, str]] = field(default_factory=list)

    def add(self, path: Path, limit: int) -> None:
        """Add a file."""
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        self.nodes += sum(1 for _ in ast.walk(tree))
        self.lines += len(code_lines(source, tree))
        for function in functions(tree):
            self.functions += 1
            branches = complexity(function)
            if branches > limit:
                self.complex_functions.append(
                    (branches, f"{path.name}:{function.lineno} {function.name}")
                )

    def row(self, name: str) -> str:
        """Return the folder's line of the table."""
        worst = max((branches for branches, _ in self.complex_functions), default=0)
        density = self.nodes / max(self.lines, 1)
        return f"{name:16}{self.lines:7}{density:8.1f}{self.functions:11}{len(self.complex_functions):6}{worst:7}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            yield node


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return 1 plus the number of branches of a function, without those of functions inside it."""
    count = 1
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, FUNCTIONS):
            continue
        count += _branches(node)
        waiting.extend(ast.iter_child_nodes(node))
    return count


def _branches(node: ast.AST) -> int:
    if isinstance(node, BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return 0


def measure(root: Path, limit: int) -> dict[str, Folder]:
    """Return the sums of each folder right below `root`; files of `root` itself count as "."."""
    folders: dict[str, Folder] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = parts[0] if len(parts) > 1 else "."
        folders.setdefault(name, Folder()).add(path, limit)
    return folders


def main() -> None:
    """Print the table, and the functions above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=SOURCE)
    parser.add_argument(
        "--limit", type=int, default=12, help="list functions that are more complex (12)"
    )
    options = parser.parse_args()
    folders = measure(options.root, options.limit)
    over = f">{options.limit}"
    print(f"{'folder':16}{'lines':>7}{'nodes/l':>8}{'functions':>11}{over:>6}{'worst':>7}")
    for name, folder in folders.items():
        print(folder.row(name))
    for name, folder in folders.items():
        for branches, place in sorted(folder.complex_functions, reverse=True):
            print(f"{branches:4}  {name}/{place}")


if __name__ == "__main__":
    main()
