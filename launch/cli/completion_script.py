"""`launch completion`: the scripts by which shells complete, made from the commands and the tree of settings.

cyclopts can write one as well: of 500 settings in a dozen commands it makes 0.9 MB, in 15 s."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, Parameter
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.cli.app import app
from launch.cli.settings_help import flag
from launch.recipes.recipe import recipe_names
from launch.settings.run_config import preset_names
from launch.settings.tree import Model, members, tag_of

BASH = """\
# completion of launch for bash 4.3 and later
declare -gA _launch_words=(
@WORDS@
)
declare -gA _launch_values=(
@VALUES@
)
_launch_runs() (  # a subshell, whose options are its own
  shopt -u failglob
  for path in "${SLUICE_DIRECTORY:-runs}"/*/; do
    name=${path%/} name=${name##*/}
    # compgen -W expands each word, so that a directory named $(command) would run it
    if [[ $name =~ ^[A-Za-z0-9_-]+$ ]]; then printf '%s\\n' "$name"; fi
  done
)
_launch() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} path= word key rest
  local -A seen=()
  if [[ $current == = ]]; then
    current=
  elif [[ $previous == = ]]; then  # bash takes --flag=value for three words
    previous=${COMP_WORDS[COMP_CWORD-2]}
  fi
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    key="${path:+$path }$word"
    if [[ $word == -* || -z "${_launch_words[$key]}" ]]; then break; fi
    path=$key
  done
  COMPREPLY=()
  if [[ $previous == --run ]]; then
    COMPREPLY=($(compgen -W "$(_launch_runs)" -- "$current"))
  elif [[ $previous == -* && -n "${_launch_values[$previous]}" ]]; then
    COMPREPLY=($(compgen -W "${_launch_values[$previous]}" -- "$current"))
  elif [[ $current == -* || $previous == "${path##* }" || $COMP_CWORD -eq 1 ]]; then
    for word in $(compgen -W "${_launch_words[${path:-launch}]}" -- "$current"); do
      rest=${word#"$current"}
      if [[ $rest == *.* ]]; then  # a section first, then what is in it
        word=$current${rest%%.*}.
        compopt -o nospace 2> /dev/null
      fi
      if [[ -z "${seen[$word]}" ]]; then seen[$word]=1; COMPREPLY+=("$word"); fi
    done
  fi
}
complete -o default -o bashdefault -F _launch launch"""
ZSH = r"""#compdef launch
# completion of launch for zsh 5.3 and later
_launch() {
  emulate -L zsh
  setopt extended_glob
  local -A known limited
  known=(
@WORDS@
  )
  limited=(
@VALUES@
  )
  local current=$PREFIX previous=${words[CURRENT-1]} place= word key rest
  local -a runs whole sections
  if [[ $current == --*=* ]]; then
    previous=${current%%=*}
    compset -P 1 '*='
    current=$PREFIX
  fi
  for word in ${words[2,CURRENT-1]}; do
    key="${place:+$place }$word"
    if [[ $word == -* || -z ${known[$key]} ]]; then break; fi
    place=$key
  done
  if [[ $previous == --run ]]; then
    runs=(${SLUICE_DIRECTORY:-runs}/*(N/:t))
    compadd -- ${(M)runs:#[A-Za-z0-9_-]##}
  elif [[ $previous == -* && -n ${limited[$previous]} ]]; then
    compadd -- ${=limited[$previous]}
  elif [[ $current == -* || $CURRENT -eq 2 || $previous == ${place##* } ]]; then
    for word in ${(M)${=known[${place:-launch}]}:#${(b)current}*}; do
      rest=${word#$current}
      if [[ $rest == *.* ]]; then  # a section first, then what is in it
        sections+=($current${rest%%.*}.)
      else
        whole+=($word)
      fi
    done
    compadd -S '' -- ${(u)sections}
    compadd -- $whole
  else
    _files
  fi
}
if [[ $funcstack[1] == _launch ]]; then  # zsh has loaded this file to complete something
  _launch "$@"
else
  compdef _launch launch
fi"""
FISH = r"""# completion of launch for fish 3.4 and later
function __launch_words
    switch "$argv"
@WORDS@
    end
end
function __launch_values
    switch "$argv"
@VALUES@
    end
end
function __launch_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l previous $before[-1]
    set -l head ''
    set -l place
    if string match -q -- '--*=*' $current
        set previous (string split -m 1 = -- $current)[1]
        set head $previous=
    end
    for word in $before[2..]
        set -l key (string trim "$place $word")
        if string match -q -- '-*' $word; or test -z "$(__launch_words $key)"
            break
        end
        set place $key
    end
    set -l values (__launch_values $previous | string split ' ')
    if test "$previous" = --run
        set -l root runs
        set -q SLUICE_DIRECTORY; and set root $SLUICE_DIRECTORY
        for run in $root/*/
            set -l name (string replace -r '^.*/([^/]+)/$' '$1' -- $run)
            string match -r '^[A-Za-z0-9_-]+$' -- $name | string replace -r '^' "$head"
        end
    else if test -n "$values"
        printf '%s\n' $head$values
    else if string match -q -- '-*' $current; or test (count $before) -eq 1
        or test "$previous" = "$(string split ' ' -- $place)[-1]"
        set -q place[1]; or set place launch
        for word in (__launch_words $place | string split ' ')
            set -l length (string length -- "$current")
            if test "$(string sub -l $length -- $word)" = "$current"
                # a section first, then what is in it
                set -l rest (string split -m 1 . -- (string sub -s (math $length + 1) -- $word))
                test (count $rest) -gt 1; and echo -- $current$rest[1].; or echo -- $word
            end
        end | sort -u
    else
        __fish_complete_path $current
    end
end
complete -c launch -f -a '(__launch_complete)'"""
Table = Mapping[str, list[str]]


def script(shell: str) -> str:
    """Return the script: what may follow each command, and the values of each flag that has only some.

    A value that it does not know is completed as a file's name."""
    text, entry = SHELLS[shell]
    for place, table in zip(("@WORDS@", "@VALUES@"), _tables(), strict=True):
        lines = (entry.format(key, " ".join(words)) for key, words in table.items())
        text = text.replace(place, "\n".join(lines))
    return text


SHELLS = {
    "bash": (BASH, "  ['{}']='{}'"),
    "zsh": (ZSH, "    '{}' '{}'"),
    "fish": (FISH, "        case '{}'\n            echo {}"),
}
"""Script of each shell, and the entry of its tables for a key and its words."""


def _tables() -> tuple[Table, Table]:
    words, values = {"launch": _names(app)}, dict(_fixed_values())
    for path, command in _commands(app, ""):
        if command.default_command is None:
            words[path] = _names(command)
            continue
        flags = dict(_flags(command))
        words[path] = [*flags, "--help"]
        values |= {name: found for name, found in flags.items() if found}
    return _each_once(words), _each_once(values)


def _each_once(entries: Table) -> Table:
    return {key: list(dict.fromkeys(words)) for key, words in entries.items()}


def _commands(above: App, path: str) -> Iterator[tuple[str, App]]:
    for name in _names(above):
        command = above[name]
        yield f"{path}{name}", command
        if command.default_command is None:
            yield from _commands(command, f"{path}{name} ")


def _names(command: App) -> list[str]:
    return [name for name in command if not name.startswith("-")]


def _flags(command: App) -> Iterator[tuple[str, list[str]]]:
    function = command.default_command
    assert function is not None
    parameters = inspect.signature(function).parameters
    hints = get_type_hints(function, include_extras=True)
    keywords = (n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY)
    yield from _flags_of({name: hints[name] for name in keywords})


def _flags_of(hints: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for name, hint in hints.items():
        named = next((p for p in get_args(hint) if isinstance(p, Parameter) and p.name), None)
        kind = get_args(hint)[0] if named is not None else hint
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings(kind, () if named is not None else (name,))
        elif is_dataclass(kind):
            yield from _flags_of(get_type_hints(kind, include_extras=True))
        else:
            flags = named.name if named is not None else (flag(name),)
            yield from ((one, _choices(kind)) for one in flags or ())


@cache
def _settings(root: Model, above: tuple[str, ...]) -> tuple[tuple[str, list[str]], ...]:
    """Return the flag of each setting below a table, with its values."""
    found: dict[str, list[str]] = {}
    for name, field in root.model_fields.items():
        here = (*above, name)
        tables = members(field.annotation)
        if not tables:
            found |= _plain(here, field)
        elif get_origin(field.annotation) not in (tuple, dict):  # which are given in files only
            kinds = [tag_of(table) for table in tables if tag_of(table)]
            if kinds:
                found[flag(".".join((*here, "type")))] = kinds
            for table in tables:
                found |= {k: v for k, v in _settings(table, here) if not k.endswith(".type") or v}
    return tuple(found.items())


def _plain(location: tuple[str, ...], field: FieldInfo) -> dict[str, list[str]]:
    if location[-1] == "type" and len(location) > 1:
        return {}  # that of the whole union has all of them
    found = {flag(".".join(location)): _choices(field.annotation)}
    if field.annotation is bool:
        found[flag(".".join((*location[:-1], f"no_{location[-1]}")))] = []
    return found


def _choices(annotation: Any) -> list[str]:
    kinds = (annotation, *get_args(annotation))
    return [str(one) for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]


def _fixed_values() -> Iterator[tuple[str, list[str]]]:
    yield "--preset", preset_names()
    yield "--recipe", recipe_names()
    yield "--log-level", ["debug", "info", "warning", "error"]
    yield "--log-format", ["text", "json"]


@app.command(usage="Usage: launch completion bash|zsh|fish")
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the scripts by which shells complete commands and flags.

    Write it, once and after each upgrade, to ~/.local/share/bash-completion/completions/launch for bash, to
    ~/.config/fish/completions/launch.fish for fish, and to a file _launch in a directory of $fpath for zsh.

    Parameters
    ----------
    shell
        Shell that reads the script.
    """
    print(script(shell))  # noqa: T201 - the user's terminal
