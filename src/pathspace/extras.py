"""Install commands of the extras, as error messages give them."""

from __future__ import annotations

EXTRA_OF = {
    "optuna": "sweep",
    "ray": "ray",
    "datasets": "download",
    "onnx": "onnx",
    "onnx2torch": "onnx",
}
"""The extra of a package that only some options need, by the name of its import."""


def install(*extras: str) -> str:
    """Return the command that installs extras.

    The package is in no registry: `pip install pathspace` would install nothing, or a stranger's
    package.

    Example:
        >>> install("sweep")
        "pip install -e '.[sweep]' in a clone of pathspace"
    """
    return f"pip install -e '.[{','.join(extras)}]' in a clone of pathspace"


def missing_package(part: str, error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error of a part that needs a package which is not installed.

    Args:
        part: what needs it.
        error: of the import.
        extra: what installs it.

    Returns:
        An error that names the part, the package and the command; the given one if a module of ours
        is missing.
    """
    name = (error.name or "").split(".")[0]
    if name in ("", "pathspace"):
        return error
    return ModuleNotFoundError(
        f"{part} needs the package {name!r}, which is not installed: {install(extra)}", name=name
    )
