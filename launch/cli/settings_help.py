"""Help for settings: those that most runs set, what each section is about, and one section in full."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from cyclopts.help import HelpPanel
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bus.errors import ConfigError, nearest
from launch.settings.environment_variables import variable_of
from launch.settings.run_config import RunConfig
from launch.settings.tree import Model, describe, members, settings_at, tag_of

COMMON: Mapping[str, tuple[str, ...]] = {
    "The run": ("run", "directory", "seed"),
    "Model and prompts": ("model.path", "data.task", "data.heldout"),
    "Rollouts": (
        "admission.groups_per_step", "admission.samples_per_prompt", "admission.max_staleness",
        "sampling.max_new_tokens", "sampling.temperature", "actors.engine.type", "actors.environment.type",
    ),
    "Training": (
        "learner.steps", "learner.optimizer.lr", "learner.loss.type", "learner.advantage.type",
        "learner.checkpoint.save_every", "warmup.steps", "evaluation.every_versions",
    ),
}  # fmt: skip
"""Settings that most runs set, by the heading under which `--help` shows them."""
EVERYTHING = "all"
"""Topic of all settings in full."""
_WORDS: Mapping[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "BOOL"}
_FIRST_SENTENCE = re.compile(r"^.*?[.;:](?=\s|$)")
Rows = Iterable[tuple[str, RenderableType]]


def show_summary(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print the panel of a command's settings in short; cyclopts calls it as the formatter of that group."""
    describe(RunConfig)
    there = {name for entry in panel.entries for name in entry.positive_names}
    for heading, keys in COMMON.items():
        rows = [(flag(key), _brief(key)) for key in keys if flag(key) in there]
        if rows:
            console.print(Text(heading, "bold"))
            console.print(_table(rows))
    tops = dict.fromkeys(name.removeprefix("--").partition(".")[0] for name in sorted(there) if "." in name)
    sections = [name for name in RunConfig.model_fields if name in tops]
    if not sections:
        return
    count = len({name for name in there if "." in name})
    console.print(Text(f"Sections, {count} settings in all", "bold"))
    example = "learner.loss" if "learner" in sections else sections[0]
    topics = f"--help {example}", f"One section; --help {EVERYTHING} shows every setting."
    console.print(_table([topics]))
    console.print(_table((name, _first_sentence(RunConfig.model_fields[name])) for name in sections))


def show_topic(console: Console, root: Model, topic: str) -> None:
    """Print the settings below `topic`, such as learner.loss, that a process with the settings `root` has.

    Raises `ConfigError` with the nearest name for a topic that is none."""
    describe(root)
    if topic == EVERYTHING:
        for name, field in root.model_fields.items():
            if members(field.annotation):
                _print_section(console, (name,), field, deep=True)
            else:
                console.print(_table([_row((name,), field)]))
        return
    location = tuple(topic.removeprefix("--").replace("-", "_").split("."))
    for n, part in enumerate(location):
        try:
            there = {**settings_at(root, location[:n]), **_kinds_at(root, location[:n])}
        except KeyError:
            there = {}
        if part not in there:
            above = ".".join(location[:n])
            hint = (
                f"there are: {', '.join(there)}" if there else f"{above} is one setting, without others below"
            )
            raise ConfigError(f"no settings {topic!r}: {nearest(part, there)}{hint}")
    table, last = location[:-1], location[-1]
    setting = settings_at(root, table).get(last)
    if setting is None:
        _print_member(console, table, _kinds_at(root, table)[last], deep=False)
    elif members(setting.annotation):
        _print_section(console, location, setting)
    else:
        console.print(_table([_row(location, setting)]))


def setting_at(key: str) -> FieldInfo:
    """Return the setting of that name, such as learner.steps, with its description."""
    describe(RunConfig)
    *above, name = key.split(".")
    return settings_at(RunConfig, above)[name]


def flag(key: str) -> str:
    """Return the flag that gives a setting."""
    return "--" + key.replace("_", "-")


def _kinds_at(root: Model, location: tuple[str, ...]) -> dict[str, Model]:
    """Return the members of the union at `location` by their `type`."""
    if not location:
        return {}
    field = settings_at(root, location[:-1]).get(location[-1])
    return {tag_of(member): member for member in members(field.annotation) if tag_of(member)} if field else {}


def _print_section(
    console: Console, location: tuple[str, ...], field: FieldInfo, *, deep: bool = False
) -> None:
    """Print what a section is for and its settings; its subsections too if `deep`, else a line for each."""
    found = members(field.annotation)
    name = ".".join(location)
    console.print(
        Text.assemble((name, "bold"), ": ", on_one_line(field.description or documentation(found[0])))
    )
    if get_origin(field.annotation) is tuple:
        console.print(Text(f"Several of these, in a file only, each as [[{name}]]:"))
    if get_origin(field.annotation) is dict:
        location = (*location, "NAME")
    if len(found) > 1:
        chosen = tag_of(type(field.default)) if isinstance(field.default, BaseModel) else ""
        kinds = "|".join(tag_of(member) for member in found)
        console.print(_table([(f"{flag(name)}.type {kinds}", f"[{chosen}]" if chosen else "")]))
    for member in found:
        _print_member(console, location, member, deep=deep, alone=len(found) == 1)


def _print_member(
    console: Console, location: tuple[str, ...], member: Model, *, deep: bool, alone: bool = False
) -> None:
    """Print the settings of one table, under its `type` unless it is the only one."""
    if not alone:
        console.print(Text.assemble(("type ", "dim"), (tag_of(member), "bold"), ": ", documentation(member)))
    fields = {name: field for name, field in member.model_fields.items() if name != "type"}
    console.print(
        _table(_row((*location, name), f) for name, f in fields.items() if not members(f.annotation))
    )
    below = {name: field for name, field in fields.items() if members(field.annotation)}
    for name, field in below.items():
        here = (*location, name)
        if deep:
            _print_section(console, here, field, deep=True)
        else:
            console.print(_table([(".".join(here), f"{_first_sentence(field)} (a section)")]))


def _row(location: tuple[str, ...], field: FieldInfo) -> tuple[str, RenderableType]:
    words = " ".join([on_one_line(field.description or ""), *_variable(".".join(location)), *_default(field)])
    if field.annotation is bool:
        negative = flag(".".join((*location[:-1], f"no_{location[-1]}")))
        return f"{flag('.'.join(location))}, {negative}", words
    return f"{flag('.'.join(location))} {metavar(field.annotation)}", words


def _brief(key: str) -> str:
    """Return the first sentence about a setting with its default; for a `type`, that about its union."""
    section, _, name = key.rpartition(".")
    if name != "type":
        return " ".join([_first_sentence(setting_at(key)), *_variable(key), *_default(setting_at(key))])
    field = setting_at(section)
    return f"{_first_sentence(field)} [{tag_of(type(field.default))}]"


def _variable(key: str) -> Iterator[str]:
    if (name := variable_of(key)) is not None:
        yield f"[${name}]"


def _default(field: FieldInfo) -> Iterator[str]:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is not None and value != () and value != {} and value != "" and not field.is_required():
        yield f"[{str(value).lower() if isinstance(value, bool) else value}]"


def metavar(annotation: Any) -> str:
    """Return what stands for a value of this type on a command line."""
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"{metavar(get_args(annotation)[0])}..."
    if get_origin(annotation) is dict:
        return "KEY VALUE"
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    if kinds:
        names = dict.fromkeys(metavar(kind) for kind in kinds if not isinstance(kind, str))
        return "|".join([*names, *(["none"] if NoneType in get_args(annotation) else [])])
    return _WORDS.get(annotation, "VALUE")


def choices(annotation: Any) -> Iterator[str]:
    """Yield the sentence that lists the values of a setting which has only some."""
    found = [one for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal
             for one in get_args(kind)]  # fmt: skip
    if found:
        yield f"One of: {', '.join(map(str, found))}."


def _first_sentence(field: FieldInfo) -> str:
    text = on_one_line(field.description or "")
    found = _FIRST_SENTENCE.match(text)
    return (found.group(0) if found else text).rstrip(";:.") + ("." if text else "")


def documentation(member: Model) -> str:
    """Return what a table says of itself, up to its first empty line."""
    return on_one_line((member.__doc__ or "").partition("\n\n")[0])


def on_one_line(documented: str) -> str:
    """Return a docstring without its line breaks."""
    return " ".join(documented.split())


def _table(rows: Rows) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold", ratio=2, max_width=46)
    table.add_column(ratio=3, overflow="fold")
    for name, words in rows:
        table.add_row(Text(name, "cyan"), Text(words) if isinstance(words, str) else words)
    return Padding(table, (0, 0, 0, 2))
