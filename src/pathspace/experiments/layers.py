"""Settings as pydantic dataclasses: types, bounds and defaults in one place, layers of values, and their errors.

The settings of a recipe, of one of its sizes, and of the command line are laid one over the other.
A value that a field refuses is told in our words, with the name of the setting and what to give.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from pathspace.experiments.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Layer = tuple[str, Mapping[str, Any]]
"""The source of some settings, as errors name it, and the settings."""
Laid = TypeVar("Laid", bound="DataclassInstance")
Item = TypeVar("Item")

CONFIG = ConfigDict(strict=True, allow_inf_nan=False)
FILE = ConfigDict(extra="forbid", allow_inf_nan=False)  # tables within others are dicts there
WANTED = {
    "bool_type": "true or false",
    "dataclass_type": "a table",
    "dict_type": "a table",
    "finite_number": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "int_type": "a whole number",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "mapping_type": "a table",
    "string_type": "a name",
    "too_long": "no more than {max_length}",
    "too_short": "at least one",
    "tuple_type": 'a list, such as [0.01, 0.1] or ["sgd", "adam"]',
}
"""By type of pydantic's errors, what to give instead."""
LARGEST = 10**30  # of a number: float32 ends at 3e38, and some are multiplied


def expected(words: str) -> PydanticCustomError:
    """Return the error of a validator of ours: what to give."""
    return PydanticCustomError("expected", "{words}", {"words": words})


def known(names: Iterable[str], kind: str = "name") -> AfterValidator:
    """Return a validator that takes these names alone."""

    def check(value: str, info: ValidationInfo) -> str:
        if value not in names:
            raise unknown_name(kind, value, names, f"the setting {info.field_name or kind!r}")
        return value

    return AfterValidator(check)


def _each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise expected("each one once")
    return values


Count = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, lt=1)]
Some = Annotated[tuple[Item, ...], Field(strict=False)]
"""A list, which may be empty."""
Several = Annotated[tuple[Item, ...], Field(strict=False, min_length=1), AfterValidator(_each_once)]
"""A list of at least one, each one once."""


def laid_over(schema: type[Laid], layers: Iterable[Layer]) -> Laid:
    """Return the settings of all layers over the defaults; later ones win, and tables are merged."""
    names = [item.name for item in fields(schema)]
    values: dict[str, Any] = {}
    for where, layer in layers:
        for name, value in layer.items():
            if name not in names:
                raise unknown_name("setting", name, names, where)
            values[name] = _merged(values.get(name), value)
    try:
        return schema(**values)
    except ValidationError as error:
        raise _translated(error, values) from None


def _merged(under: Any, over: Any) -> Any:
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{name: _merged(under.get(name), value) for name, value in over.items()}}


def check_setting(schema: type, name: str, value: Any, option: str = "") -> None:
    """Check one setting by itself; names that are no settings pass."""
    hint = _hints(schema).get(name)
    wanted = problem(hint, value) if hint is not None else ""
    if wanted:
        raise wrong(name, value, wanted, option)


def _wanted(error: Mapping[str, Any]) -> str:
    if error["type"] == "expected":
        return error["msg"]
    wanted = WANTED[error["type"]].format(**error.get("ctx", {}))
    return f"{wanted} each" if error["loc"] and isinstance(error["loc"][-1], int) else wanted


def wrong(name: str, value: Any, wanted: str, option: str = "") -> ConfigurationError:
    """Return the error of a setting, or of the option that it came by."""
    shown = list(value) if isinstance(value, tuple) else value
    where = f"option {option}" if option else f"setting {name!r}"
    return ConfigurationError(f"The {where} is {shown!r}: give {wanted}.")


def problem(hint: Any, value: Any) -> str:
    """Return what to give in the place of a value; empty if it fits the type."""
    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        return _wanted(_first(error))
    return ""


def _first(error: ValidationError) -> Mapping[str, Any]:
    """Return the first of pydantic's errors; one of ours within it is raised as it is."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        raise cause from None
    return first


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=CONFIG)


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _translated(error: ValidationError, values: Mapping[str, Any]) -> ConfigurationError:
    """Return the first error in our words; a list, or a table with odd keys, is shown as a whole."""
    first = _first(error)
    path = [*takewhile(lambda part: isinstance(part, str) and part != "[key]", first["loc"])]
    table = ".".join(map(str, path[:-1]))
    if first["type"] == "missing":
        return ConfigurationError(f"The setting {table!r} lacks {path[-1]!r}: say what it takes.")
    if first["type"] == "extra_forbidden":
        return ConfigurationError(
            f"Unknown option {path[-1]!r} in the setting {table!r}: leave it out."
        )
    value: Any = values
    for name in path:
        value = value[name]
    return wrong(".".join(map(str, path)), value, _wanted(first))


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `--set NAME=VALUE` options; the values as `read_value` takes them."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set {assignment!r} has no value: write --set NAME=VALUE.")
        table, dot, option = name.partition(".")
        value = {option: read_value(text)} if dot else read_value(text)
        earlier = settings.get(table)
        if dot and not isinstance(earlier, dict | None):
            raise ConfigurationError(
                f"{table!r} is given both as a value and as a table: give one of them."
            )
        settings[table] = _merged(earlier, value)
    return settings


def read_value(text: str) -> Any:
    """Read a value of the command line: as in TOML, but .5 and 1. are numbers, too, and a bare word is a string.

    Those numbers may stand in a list of numbers.
    """
    text = text.strip()
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        json.dumps(value)
        return value
    # no setting is a date, which is TOML, too, or has 5,000 digits
    except (ValueError, TypeError, RecursionError):
        pass
    try:
        if text.startswith("[") and text.endswith("]"):
            value = list(map(float, text[1:-1].split(",")))
            return value if all(map(math.isfinite, value)) else text
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def plain_values(settings: DataclassInstance) -> dict[str, Any]:
    """Return settings as plain values for JSON, which can be laid over the defaults again."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(settings).items()}
