"""Settings as pydantic dataclasses: types, bounds and defaults in one place, layers of values, and their errors.

The settings of a recipe, of one of its sizes, and of the command line are laid one over the other.
A value that a field refuses is told in our words, with the name of the setting and what to give.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

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
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
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
    """Return the settings of all layers over the defaults; later ones win, and tables are merged.

    Args:
        schema: A pydantic dataclass.
        layers: From the first to the last.

    Raises:
        ConfigurationError: A name is unknown, or a value impossible.
    """
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
        raise _translated(error, schema, values) from None


def _merged(under: Any, over: Any) -> Any:
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{name: _merged(under.get(name), value) for name, value in over.items()}}


def check_setting(schema: type, name: str, value: Any, option: str = "") -> None:
    """Check one setting by itself.

    Args:
        schema: A pydantic dataclass.
        name: Of a setting; others pass.
        value: Of the setting.
        option: The option of the command line that it came by; empty where it did not.

    Raises:
        ConfigurationError: Names the option, or the setting, and what to give.
    """
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
    """Return what to give in the place of a value; empty if it fits the type.

    Raises:
        ConfigurationError: It is none of the names that the type knows.
    """
    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigurationError):
            raise cause from None
        return _wanted(first)
    return ""


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=None if is_dataclass(hint) else CONFIG)


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def read(schema: type[Laid], content: Mapping[str, Any], file: str) -> Laid:
    """Return the content of a file of ours; `file` is its name for errors.

    Raises:
        ConfigurationError: A key is unknown or missing, or a value impossible.
    """
    try:
        return _adapter(schema).validate_python(content)
    except ValidationError as error:
        raise _translated(error, schema, content, file) from None


def _translated(
    error: ValidationError, schema: type, values: Any, file: str = ""
) -> ConfigurationError:
    """Return the first error in our words, of a setting or of a key in a file."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        return cause
    hint: Any = schema
    value: Any = values
    path: list[str] = []
    for part in first["loc"]:
        if _is_shown_as_a_whole(part, value):
            break
        if not isinstance(part, int):
            table = ".".join(path)
            if first["type"] == "missing" and part not in value:
                return _missing(table, part, file)
            if first["type"] in _UNKNOWN and part == first["loc"][-1]:
                return _unknown(table, part, hint, file)
            path.append(part)
        hint = _entry(hint, "" if isinstance(part, int) else part)
        value = value[part]
    name = ".".join(path)
    wanted = _wanted(first)
    if file:
        return ConfigurationError(f"The key {name!r} in {file} is {value!r}: give {wanted}.")
    return wrong(name, value, wanted)


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a name that a table does not have."""


def _is_shown_as_a_whole(part: int | str, value: Any) -> bool:
    """Say whether an error shows all of a value: a list whose items are no tables, or a table with odd keys."""
    if isinstance(part, int):
        return not isinstance(value[part], Mapping)
    return part == "[key]"


def _unknown(table: str, name: str, hint: Any, file: str) -> ConfigurationError:
    known = [each for each in _hints(_plain(hint)) if not file or each != "name"]
    if not file:
        return unknown_name("option", name, known, f"the setting {table!r}")
    return unknown_name("key", name, known, f"[{table}] in {file}" if table else file)


def _missing(table: str, name: str, file: str) -> ConfigurationError:
    if file:
        where = f"[{table}] in {file}" if table else file
        return ConfigurationError(f"The key {name!r} is missing in {where}: add it.")
    return ConfigurationError(f"The setting {table!r} lacks {name!r}: say what it takes.")


def _entry(hint: Any, name: str) -> Any:
    """Return the type of an entry of a table, or of the items of a list."""
    hint = _plain(hint)
    if get_origin(hint) is tuple:
        return get_args(hint)[0]
    return get_args(hint)[1] if get_origin(hint) is Mapping else _hints(hint)[name]


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `--set NAME=VALUE` options; the values as `read_value` takes them.

    Raises:
        ConfigurationError: There is no equals sign.
    """
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set {assignment!r} has no value: write --set NAME=VALUE.")
        value = read_value(text)
        table, dot, option = name.partition(".")
        if dot:
            options = settings.setdefault(table, {})
            if not isinstance(options, dict):
                raise ConfigurationError(
                    f"{table!r} is given both as a value and as a table: give one of them."
                )
            options[option] = value
        else:
            earlier = settings.get(name)
            if isinstance(earlier, dict) and isinstance(value, dict):
                value = {**earlier, **value}
            settings[name] = value
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
