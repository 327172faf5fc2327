"""Built-in tasks: prompts, held-out prompts and noisy demonstrations, written once as JSON Lines files."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bus.codec import Json
from bus.errors import ConfigError
from bus.messages import Prompt
from storage.disk.atomic_files import make_directory, write_file, write_json
from storage.prompts.dataset import prompt_content
from storage.prompts.rows import read_rows

GENERATOR_VERSION = 1
"""Raise it when a generator writes other rows for the same parameters."""

HELDOUT_SEED = 12345
"""Of the held-out prompts, whatever the seed of the run."""


@dataclass(frozen=True, slots=True)
class Task:
    """A family of numbered problems and how its files are drawn from it."""

    problem: Callable[[int], tuple[str, str]]
    """Prompt and label of the problem with this number."""
    demonstration: Callable[[int, Random, bool], str]
    """A worked answer to the problem with this number: right, or wrong in a way worth unlearning."""
    problems: int
    """How many there are, counted from 0."""
    wrong_share: float
    """Share of demonstrations that are wrong, which is what reinforcement learning then repairs."""
    prompts: int = 20_000
    heldout: int = 256
    demonstrations: int = 26_000


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of a generated task."""

    prompts: Path
    heldout: Path
    demonstrations: Path


def generate_task(name: str, directory: Path, *, seed: int) -> TaskFiles:
    """Write the task's files, unless they are there with the same parameters and seed.

    Training prompts and demonstrations come from `seed` and never contain a held-out prompt."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"no built-in task {name!r}: {hint}the tasks are: {', '.join(TASKS)}")
    task = TASKS[name]
    files = TaskFiles(*(directory / f"{part}.jsonl" for part in ("prompts", "heldout", "demonstrations")))
    manifest = directory / "task.json"
    wanted = _manifest(name, task, seed)
    if not _already_there(files, manifest, wanted):
        make_directory(directory)
        manifest.unlink(missing_ok=True)  # a crash from here on leaves files that nobody trusts
        _write(task, files, seed)
        write_json(manifest, wanted)
    return files


def load_demonstrations(path: Path) -> list[tuple[Prompt, str]]:
    """Prompts with worked answers, from a .jsonl or .parquet file with the keys `prompt` and `response`.

    Raises `ConfigError` naming the line (from 1) or row (from 0), what is wrong with it and what to do."""
    pairs = []
    for row in read_rows(path):
        response = row.required("response")
        if not (isinstance(response, str) and response):
            raise ConfigError(f"{row.where}: 'response' is not a text or is empty: fill it or remove the row")
        pairs.append((Prompt(content=prompt_content(row, "prompt")), response))
    return pairs


def _manifest(name: str, task: Task, seed: int) -> dict[str, Json]:
    return {
        "task": name,
        "seed": seed,
        "generator_version": GENERATOR_VERSION,
        "prompts": task.prompts,
        "heldout": task.heldout,
        "demonstrations": task.demonstrations,
        "wrong_share": task.wrong_share,
    }


def _already_there(files: TaskFiles, manifest: Path, wanted: dict[str, Json]) -> bool:
    paths = (files.prompts, files.heldout, files.demonstrations)
    try:
        return all(path.is_file() for path in paths) and json.loads(manifest.read_bytes()) == wanted
    except (OSError, ValueError):
        return False


def _write(task: Task, files: TaskFiles, seed: int) -> None:
    heldout = Random(HELDOUT_SEED).sample(range(task.problems), task.heldout)
    held = frozenset(heldout)
    rng = Random(seed)
    drawn = rng.sample(range(task.problems), min(task.problems, task.prompts + task.heldout))
    training = [number for number in drawn if number not in held][: task.prompts]
    _write_rows(files.heldout, (_prompt_row(task, number) for number in heldout))
    _write_rows(files.prompts, (_prompt_row(task, number) for number in training))
    _write_rows(files.demonstrations, _demonstration_rows(task, held, rng))


def _prompt_row(task: Task, number: int) -> dict[str, str]:
    prompt, label = task.problem(number)
    return {"prompt": prompt, "label": label}


def _demonstration_rows(task: Task, held: frozenset[int], rng: Random) -> Iterator[dict[str, str]]:
    written = 0
    while written < task.demonstrations:
        number = rng.randrange(task.problems)
        if number not in held:
            response = task.demonstration(number, rng, rng.random() < task.wrong_share)
            yield {"prompt": task.problem(number)[0], "response": response}
            written += 1


def _write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


# --- sort: six digits in ascending order ---


def _sort_problem(number: int) -> tuple[str, str]:
    digits = f"{number:06d}"
    return f"sort {digits}", "".join(sorted(digits))


def _sort_demonstration(number: int, rng: Random, wrong: bool) -> str:
    """Wrong is, half of the time each, descending or a copy of the input."""
    digits = f"{number:06d}"
    answer = "".join(sorted(digits))
    if not wrong:
        return answer
    return answer[::-1] if rng.random() < 0.5 else digits


# --- addition: two two-digit numbers, column by column ---


def _addition_problem(number: int) -> tuple[str, str]:
    a, b = divmod(number, 100)
    return f"{a:02d}+{b:02d}=", f"{a + b:03d}"


def _addition_demonstration(number: int, rng: Random, wrong: bool) -> str:
    """For each column from the right "<digit><digit><carry in><sum> ", then "=<total>".

    Wrong is a carry into the tens that is not the one out of the units: the total is off by ten."""
    a, b = divmod(number, 100)
    units = a % 10 + b % 10
    carry = units // 10 ^ wrong
    tens = a // 10 + b // 10 + carry
    columns = f"{a % 10}{b % 10}0{units:02d} {a // 10}{b // 10}{carry}{tens:02d} "
    return f"{columns}={10 * tens + units % 10:03d}"


TASKS = {
    "sort": Task(_sort_problem, _sort_demonstration, problems=10**6, wrong_share=0.7),
    "addition": Task(_addition_problem, _addition_demonstration, problems=10**4, wrong_share=0.5),
}
