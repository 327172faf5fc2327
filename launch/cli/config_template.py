"""The file that `launch init` writes: settings as commented lines, each under what `--help` says of it."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from launch.cli.settings_help import COMMON, choices, documentation, on_one_line, setting_at
from launch.settings.environment_variables import variable_of
from launch.settings.run_config import RunConfig
from launch.settings.sources import Location, leaves
from launch.settings.toml import assignment
from launch.settings.tree import Model, members, tag_of

WIDTH = 98
REQUIRED = "..."
"""Stands for the value of a setting that has no default."""
HEADER = """\
Settings of a run: `launch local --config {name}` reads them.

A line that begins with # and a name shows a default; take the # away to change it. Each line
stands for itself, in any order. "none" means no value. A setting that is not here keeps its
default, and flags go over this file. `launch local --help all` describes every setting;
`launch local --config {name} --print-config` shows what is in force."""
FIRST: Mapping[str, tuple[str, ...]] = {
    "Model and prompts": ("data.prompts",),
    "Rollouts": ("actors.environment.reward",),
}
"""Settings that come first under a heading of `COMMON`: in `--help` they are short forms."""


def template(name: str, active: Mapping[str, Any], *, everything: bool) -> str:
    """Return the text of a configuration file.

    Args:
        name: of the file, for its own first lines.
        active: settings whose lines are no comments, with other values than the defaults.
        everything: whether every setting gets a line, or those that most runs set."""
    return "\n".join([*_prose(HEADER.format(name=name)), *_Template(active).lines(everything), ""])


class _Template:
    def __init__(self, active: Mapping[str, Any]) -> None:
        self._active = {location: value for location, value in leaves(active) if value != {}}
        self._written: set[Location] = set()

    def lines(self, everything: bool) -> Iterator[str]:
        for heading, keys in COMMON.items():
            yield from _heading(heading)
            for key in (*FIRST.get(heading, ()), *keys):
                yield from self._common(tuple(key.split(".")))
        if rest := [location for location in self._active if location not in self._written]:
            yield from _heading("Further settings in force")
            for location in rest:
                yield assignment(location, self._active[location])
                self._written.add(location)
        yield from _heading("All other settings" if everything else "Sections with further settings")
        for name, field in RunConfig.model_fields.items():
            if everything:
                yield from self._all_of((name,), field, RunConfig())
            elif members(field.annotation):
                yield from _prose(f"{name}: {documentation_of(field)} `launch local --help {name}`")

    def _common(self, location: Location) -> Iterator[str]:
        section, name = location[:-1], location[-1]
        if name == "type":
            yield from self._type(section, setting_at(".".join(section)))
        else:
            field = setting_at(".".join(location))
            yield from self._line(location, field, field.get_default(call_default_factory=True))

    def _all_of(self, location: Location, field: FieldInfo, above: BaseModel | None) -> Iterator[str]:
        """Yield a setting, or a section with all below it; `above` is the table it is in, as by default."""
        found = members(field.annotation)
        default = _default(field, location[-1], above)
        if not found:
            yield from self._line(location, field, default)
        elif get_origin(field.annotation) in (tuple, dict):
            yield from self._several(location, field)
        else:
            yield from _heading(f"{'.'.join(location)}: {documentation_of(field)}")
            if len(found) > 1:
                yield from self._type(location, field)
            for member in found:
                if len(found) > 1 and len(member.model_fields) > 1:
                    yield from ["", *_prose(f"With {assignment((*location, 'type'), tag_of(member))}:")]
                yield from self._below(location, member, default if isinstance(default, member) else None)

    def _below(self, location: Location, member: Model, default: BaseModel | None) -> Iterator[str]:
        fields = {name: field for name, field in member.model_fields.items() if name != "type"}
        for name, field in sorted(fields.items(), key=lambda entry: bool(members(entry[1].annotation))):
            yield from self._all_of((*location, name), field, default)

    def _type(self, section: Location, field: FieldInfo) -> Iterator[str]:
        kinds = ", ".join(tag_of(member) for member in members(field.annotation))
        default = tag_of(type(field.default)) if isinstance(field.default, BaseModel) else REQUIRED
        yield from self._write((*section, "type"), f"{documentation_of(field)} One of: {kinds}.", default)

    def _line(self, location: Location, field: FieldInfo, default: Any) -> Iterator[str]:
        said = [on_one_line(field.description or ""), *choices(field.annotation)]
        if (variable := variable_of(".".join(location))) is not None:
            said.append(f"${variable} goes over it.")
        yield from self._write(location, " ".join(said), default)

    def _several(self, location: Location, field: FieldInfo) -> Iterator[str]:
        """Say how a table of tables is written; they come last, since each begins with a header."""
        name = ".".join(location)
        header = f"[[{name}]]" if get_origin(field.annotation) is tuple else f"[{name}.NAME]"
        said = f"Several of these may stand at the end of this file, each under a line {header}"
        yield from ["", *_prose(f"{name}: {documentation_of(field)} {said}; `launch local --help {name}`.")]

    def _write(self, location: Location, said: str, default: Any) -> Iterator[str]:
        if location in self._written:
            return
        self._written.add(location)
        yield from ["", *_prose(said)]
        if location in self._active:
            yield assignment(location, self._active[location])
        else:
            yield "#" + assignment(location, to_jsonable_python(default, inf_nan_mode="constants"))


def documentation_of(field: FieldInfo) -> str:
    """Return what a section is for."""
    return on_one_line(field.description or documentation(members(field.annotation)[0]))


def _default(field: FieldInfo, name: str, above: BaseModel | None) -> Any:
    """Return a setting's default in the table above it, or the one of its own."""
    if above is not None:
        return getattr(above, name)
    if field.is_required():
        return REQUIRED
    return field.get_default(call_default_factory=True, validated_data={})


def _heading(text: str) -> Sequence[str]:
    return ["", "", *_prose(f"--- {text}")]


def _prose(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, WIDTH, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"# {line}".rstrip() for line in lines]
