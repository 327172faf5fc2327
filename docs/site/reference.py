"""Writes the reference from the code: settings, commands, public names of Python, and rooms."""

import ast
import html
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_origin

import docstring_parser
from cyclopts import App
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import launch
from launch.cli.main import GROUPS, app
from launch.cli.settings_help import documentation, metavar, on_one_line
from launch.settings.run_config import RunConfig
from launch.settings.tree import members, tag_of

Location = tuple[str, ...]
NO_FLAGS = "bench", "soak"
"""Commands whose flags `--help` alone tells."""
ROOT = Path(__file__).parents[2]
PACKAGES = ("bus", "storage", "actors", "learner", "launch", "tests/benchmarks", "tests/soak")
BAR = r"\|"
"""A bar within a cell of a table."""


def quick_start(readme: str) -> str:
    """Return the README as a page beside the others."""
    return readme.replace("](docs/", "](")


def settings_page() -> str:
    """Return a page with every setting of a run: its values, its default, its meaning."""
    lines = [
        "# Settings",
        "",
        "Every setting of a run. `--print-config` shows those in force with their origin, and",
        "[configuration](../configuration.md) tells where they come from. A flag is the name of a setting",
        "with `--` before it and `-` for `_`.",
        "",
    ]
    plain = {name: f for name, f in RunConfig.model_fields.items() if not members(f.annotation)}
    lines += ["## The run", "", *_table((), plain)]
    for name, field in RunConfig.model_fields.items():
        if members(field.annotation):
            lines += _section((name,), field)
    return "\n".join(lines) + "\n"


def _section(location: Location, field: FieldInfo) -> Iterator[str]:
    found, name = members(field.annotation), ".".join(location)
    yield from ["", f"## {name} {{ #{name} }}", ""]
    yield _escaped(on_one_line(field.description or documentation(found[0])))
    if get_origin(field.annotation) in (tuple, dict):
        location = (*location, "NAME") if get_origin(field.annotation) is dict else location
        yield f"\nSeveral of these, in a file only, each under `[{'.'.join(location)}]`."
    if len(found) > 1:
        default = tag_of(type(field.default)) if isinstance(field.default, BaseModel) else "none"
        kinds = ", ".join(f"`{tag_of(member)}`" for member in found)
        yield f"\n`type` is one of {kinds}; default `{default}`."
    below: dict[Location, FieldInfo] = {}
    for member in found:
        if len(found) > 1:
            yield from ["", f"**type `{tag_of(member)}`**: {_escaped(documentation(member))}"]
        fields = {key: one for key, one in member.model_fields.items() if key != "type"}
        yield from ["", *_table(location, {k: f for k, f in fields.items() if not members(f.annotation)})]
        below |= {(*location, k): f for k, f in fields.items() if members(f.annotation)}
    for here, one in below.items():
        yield from _section(here, one)


def _table(location: Location, fields: dict[str, FieldInfo]) -> Iterator[str]:
    if not fields:
        return
    yield from ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        values = metavar(field.annotation).replace("|", BAR)
        meaning = _escaped(on_one_line(field.description or "")).replace("|", BAR)
        yield f"| `{'.'.join((*location, name))}` | {values} | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value in ("", (), {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`".replace("|", BAR)


def _escaped(text: str) -> str:
    """Return a docstring for Markdown: what is in backticks stays, what looks like a tag does not."""
    return "`".join(
        part if n % 2 else html.escape(part, quote=False) for n, part in enumerate(text.split("`"))
    )


def commands_page() -> str:
    """Return a page with every command: what it does, and its parameters besides settings."""
    lines = ["# Commands", "", "Every command; `launch COMMAND --help` says the same.", ""]
    for heading, names in GROUPS.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += _command((name,), app[name])
    return "\n".join(lines) + "\n"


def _command(path: Location, command: App) -> Iterator[str]:
    below = [name for name in command if not name.startswith("-")]
    described = docstring_parser.parse(inspect.getdoc(command.default_command) or str(command.help or ""))
    about = (described.short_description, described.long_description)
    yield from [f"### launch {' '.join(path)}", "", _escaped("\n\n".join(filter(None, about))), ""]
    if not below and path[0] not in NO_FLAGS:
        yield from _flags(
            command, {one.arg_name: on_one_line(one.description or "") for one in described.params}
        )
    for name in below:
        yield from _command((*path, name), command[name])


def _flags(command: App, said: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of a command's parameters; those that are settings stand on the page of settings."""
    rows = []
    for argument in command.assemble_argument_collection():
        name, *_ = argument.names
        is_setting = argument.keys and not name.startswith("--log-")
        if not name.startswith("--") or is_setting or not argument.show:
            continue
        meaning = argument.parameter.help or said.get(argument.field_info.name, "")
        rows.append(f"| `{name}` | {_escaped(on_one_line(meaning)).replace('|', BAR)} |")
    if rows:
        yield from ["| flag | meaning |", "|---|---|", *rows, ""]


def python_page() -> str:
    """Return a page with every public name of `launch`."""
    lines = ["# Python", "", "Public names of `launch`; [From Python](../python.md) shows them at work.", ""]
    for name in launch.__all__:
        lines += [f"::: {getattr(launch, name).__module__}.{name}", ""]
    return "\n".join(lines)


def rooms_page() -> str:
    """Return a page with every room of the code, and what it holds."""
    lines = [
        "# Rooms",
        "",
        "Every folder of the code, by the first sentence of its `__init__.py`;",
        "[architecture](../architecture.md#rooms) tells how imports go between them.",
        "",
        "| room | what it holds |",
        "|---|---|",
    ]
    for name in PACKAGES:
        for file in sorted((ROOT / name).rglob("__init__.py")):
            room = file.parent.relative_to(ROOT).as_posix()
            holds = ast.get_docstring(ast.parse(file.read_text())) or ""
            first, dot, _ = " ".join(holds.partition("\n\n")[0].split()).partition(". ")
            lines.append(f"| `{room}/` | {_escaped(first + dot.strip())} |")
    return "\n".join(lines) + "\n"
