"""`--set key=value`: typed changes to nested configs, with an answer to every misspelt key."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any


def parse_overrides(assignments: Iterable[str], sections: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """Reads assignments to the fields of some dataclasses.

    Args:
        assignments: "section.field=value"; "field=value" where only one section has the field.
            Values are read by the type of the field; "none" is None where that is allowed.
        sections: dataclass by section name.

    Returns:
        The values, by section and field.

    Raises:
        ValueError: no "=", a key that does not exist or is in several sections, a value that is not
            of the field's type.
    """
    hints = {name: typing.get_type_hints(kind) for name, kind in sections.items()}
    fields = {
        f"{name}.{field.name}": hints[name][field.name]
        for name, kind in sections.items()
        for field in dataclasses.fields(kind)
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"--set {assignment}: write it as key=value")
        matches = [name for name in fields if key in (name, name.partition(".")[2])]
        if not matches:
            raise ValueError(f"--set {assignment}: there is no {key!r}; {_nearest(key, fields)}")
        if len(matches) > 1:
            raise ValueError(f"--set {assignment}: {key!r} could be {' or '.join(matches)}")
        section, _, field = matches[0].partition(".")
        found[section][field] = _read(assignment, text.strip(), fields[matches[0]])
    return found


def _nearest(key: str, fields: Iterable[str]) -> str:
    by_name = {name: name for name in fields} | {name.partition(".")[2]: name for name in fields}
    close = difflib.get_close_matches(key, by_name, n=3, cutoff=0.65)
    if not close:
        return f"the keys are {', '.join(fields)}"
    return f"the nearest are {', '.join(dict.fromkeys(by_name[name] for name in close))}"


def _read(assignment: str, text: str, hint: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if type(None) in kinds and text.lower() == "none":
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in kinds:
        try:
            return _convert(text, kind)
        except ValueError:
            continue
    wanted = " or ".join(_describe(kind) for kind in kinds)
    raise ValueError(f"--set {assignment}: {text!r} is not {wanted}")


def _convert(text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        matches = [choice for choice in typing.get_args(kind) if str(choice) == text]
        if not matches:
            raise ValueError
        return matches[0]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    return kind(text)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    return names.get(kind, str(kind))
