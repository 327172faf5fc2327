"""Built-in tasks: prompts, held-out prompts and noisy demonstrations, written once as JSON Lines files."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

from bus.codec import Json
from bus.errors import ConfigError, nearest
from bus.messages import Prompt
from storage.built_in_tasks import demonstrations as shown
from storage.built_in_tasks import lookup_tasks as lookups
from storage.built_in_tasks import tiny_repositories as repositories
from storage.built_in_tasks.reasoning_gym_tasks import PREFIX, prompt_rows
from storage.disk.atomic_files import make_directory, write_file, write_json
from storage.prompt_files.dataset import is_trained, prompt_content, tool_schemas
from storage.prompt_files.rows import Row, read_rows

CELLS, CELL = 3, 8
"""Cells in a row of a picture, and the pixels of one, in which there is one shape at most."""
MARGIN = 1
"""Pixels around a shape in its cell."""
MOST = 6
"""Most shapes in a picture; there is one at least."""
COLOURS = ((220, 40, 40), (40, 160, 60), (50, 80, 220), (230, 160, 20))
PAPER = (245, 245, 245)
COUNT_PROBLEMS = 10**6


def count_problem(number: int) -> tuple[list[Json], str]:
    """Return a message that shows a picture and asks how many shapes it has, and the answer."""
    rng = Random(number)
    shapes = rng.randint(1, MOST)
    content: list[Json] = [
        {"type": "image_url", "image_url": {"url": _picture(shapes, rng)}},
        {"type": "text", "text": "shapes?"},
    ]
    return [{"role": "user", "content": content}], str(shapes)


def count_demonstration(number: int, rng: Random, wrong: bool) -> str:
    """Return the number of shapes; a wrong answer is off by one."""
    shapes = Random(number).randint(1, MOST)
    return str(shapes + rng.choice((-1, 1)) if wrong else shapes)


def _picture(shapes: int, rng: Random) -> str:
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), PAPER)
    draw = ImageDraw.Draw(picture)
    for cell in rng.sample(range(CELLS**2), shapes):
        left, top = cell % CELLS * CELL + MARGIN, cell // CELLS * CELL + MARGIN
        box = (left, top, left + CELL - 2 * MARGIN - 1, top + CELL - 2 * MARGIN - 1)
        rng.choice((draw.ellipse, draw.rectangle))(box, fill=rng.choice(COLOURS))
    file = BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


GENERATOR_VERSION = 2
"""Version of the generators; raise it when one writes other rows for the same parameters."""
REASONING_GYM_VERSION = 3
"""Version of the prompts of reasoning-gym, which hold their entries."""
OF_LIBRARY, HELDOUT_OF_LIBRARY = 2000, 100
"""Prompts and held-out prompts of a library's task, some of which take it a while to make."""
HELDOUT_SEED = 12345
"""Seed of the held-out prompts, whatever the seed of the run."""


@dataclass(frozen=True, slots=True)
class BuiltInTask:
    """A family of numbered problems, from which files are drawn."""

    problem: Callable[[int], tuple[str | list[Json], str]]
    """Function from a number to the prompt and label of that problem."""
    demonstration: Callable[[int, Random, bool], str | tuple[list[Json], str]] | None
    """Function from a number to a worked answer of that problem, right or plausibly wrong; in a task of
    several turns to the chat before one of them, and that turn. None for a task without demonstrations."""
    problems: int
    """Number of problems, counted from 0."""
    wrong_share: float
    """Share of wrong demonstrations, which reinforcement learning then corrects."""
    prompts: int = 20_000
    heldout: int = 256
    demonstrations: int = 26_000
    passages: Callable[[], Sequence[str]] | None = None
    """Function that returns the corpus in which the answers stand; None for a task without one."""
    metadata: Callable[[int], dict[str, Json]] | None = None
    """Function from a number to the metadata of that problem; None for a task without any."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of a generated task."""

    prompts: Path
    heldout: Path
    demonstrations: Path


def generate_task(name: str, directory: Path, *, seed: int) -> TaskFiles:
    """Write the task's files, unless they are there with the same parameters and seed.

    Training prompts and demonstrations come from `seed` and never contain a held-out prompt. Those of
    `reasoning_gym/NAME` have no demonstrations, and an empty file."""
    if name.startswith(PREFIX):
        return _generate_reasoning_gym(name, directory, seed=seed)
    if name not in TASKS:
        raise ConfigError(
            f"no built-in task {name!r}: {nearest(name, TASKS)}the tasks are: {', '.join(TASKS)}"
        )
    task = TASKS[name]
    files = TaskFiles(*(directory / f"{part}.jsonl" for part in ("prompts", "heldout", "demonstrations")))
    manifest = directory / "task.json"
    wanted = _manifest(name, task, seed)
    if not _already_there(files, manifest, wanted):
        make_directory(directory)
        manifest.unlink(missing_ok=True)  # after a crash the files are written again
        _write(task, files, seed)
        write_json(manifest, wanted)
    return files


def task_passages(name: str) -> Sequence[str]:
    """Return the corpus of a built-in task. Raises `ConfigError` for a task that has none."""
    having = {name: task.passages for name, task in TASKS.items() if task.passages is not None}
    if name not in having:
        raise ConfigError(f"no built-in task {name!r} with a corpus: there are: {', '.join(having)}")
    return having[name]()


def _generate_reasoning_gym(name: str, directory: Path, *, seed: int) -> TaskFiles:
    files = TaskFiles(*(directory / f"{part}.jsonl" for part in ("prompts", "heldout", "demonstrations")))
    manifest = directory / "task.json"
    wanted: dict[str, Json] = {
        "task": name, "seed": seed, "prompts": OF_LIBRARY, "heldout": HELDOUT_OF_LIBRARY,
        "generator_version": REASONING_GYM_VERSION,
    }  # fmt: skip
    if not _already_there(files, manifest, wanted):
        make_directory(directory)
        manifest.unlink(missing_ok=True)
        source = name.removeprefix(PREFIX)
        heldout = list(prompt_rows(source, size=HELDOUT_OF_LIBRARY, seed=HELDOUT_SEED))
        held = frozenset(str(row["prompt"]) for row in heldout)
        _write_rows(files.heldout, heldout)
        _write_rows(files.prompts, prompt_rows(source, size=OF_LIBRARY, seed=seed, besides=held))
        _write_rows(files.demonstrations, ())
        write_json(manifest, wanted)
    return files


def load_demonstrations(path: Path) -> list[tuple[Prompt, str]]:
    """Read demonstrations from a .jsonl or .parquet file: rows with the keys `prompt` and `response`, or with
    `messages`, a chat, whose response is empty; perhaps with `tools`.

    Raises `ConfigError` naming the line or row, what is wrong with it and what to do."""
    pairs = []
    for row in read_rows(path):
        tools = tool_schemas(row.values.get("tools"), f"{row.where}: 'tools'")
        if "messages" in row.values:
            pairs.append((Prompt(content=_chat(row), tools=tools), ""))
            continue
        response = row.required("response")
        if not (isinstance(response, str) and response):
            raise ConfigError(f"{row.where}: 'response' is not a text or is empty: fill it or remove the row")
        pairs.append((Prompt(content=prompt_content(row, "prompt"), tools=tools), response))
    return pairs


def _chat(row: Row) -> list[Json]:
    chat = prompt_content(row, "messages")
    if not isinstance(chat, list) or not any(map(is_trained, chat)):
        raise ConfigError(
            f"{row.where}: 'messages' has no answer to train on: a message with the role 'assistant', and a "
            "weight other than 0"
        )
    return chat


def _manifest(name: str, task: BuiltInTask, seed: int) -> dict[str, Json]:
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


def _write(task: BuiltInTask, files: TaskFiles, seed: int) -> None:
    heldout = Random(HELDOUT_SEED).sample(range(task.problems), task.heldout)
    held = frozenset(heldout)
    rng = Random(seed)
    drawn = rng.sample(range(task.problems), min(task.problems, task.prompts + task.heldout))
    training = [number for number in drawn if number not in held][: task.prompts]
    _write_rows(files.heldout, (_prompt_row(task, number) for number in heldout))
    _write_rows(files.prompts, (_prompt_row(task, number) for number in training))
    _write_rows(files.demonstrations, _demonstration_rows(task, held, rng))


def _prompt_row(task: BuiltInTask, number: int) -> dict[str, Json]:
    prompt, label = task.problem(number)
    metadata: dict[str, Json] = {} if task.metadata is None else {"metadata": task.metadata(number)}
    return {"prompt": prompt, "label": label, **metadata}


def _demonstration_rows(task: BuiltInTask, held: frozenset[int], rng: Random) -> Iterator[dict[str, Json]]:
    written = 0
    while task.demonstration is not None and written < task.demonstrations:
        number = rng.randrange(task.problems)
        if number not in held:
            worked = task.demonstration(number, rng, rng.random() < task.wrong_share)
            prompt: str | list[Json]
            prompt, response = (task.problem(number)[0], worked) if isinstance(worked, str) else worked
            yield {"prompt": prompt, "response": response}
            written += 1


def _write_rows(path: Path, rows: Iterable[dict[str, Json]]) -> None:
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


# --- sort: six digits in ascending order ---


def _sort_problem(number: int) -> tuple[str, str]:
    digits = f"{number:06d}"
    return f"sort {digits}", "".join(sorted(digits))


def _sort_demonstration(number: int, rng: Random, wrong: bool) -> str:
    """Return the sorted digits. A wrong answer is descending or a copy, half of the time each."""
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
    """Return "<digit><digit><carry in><sum> " for each column from the right, then "=<total>". A wrong answer
    has the wrong carry into the tens, so that the total is off by ten."""
    a, b = divmod(number, 100)
    units = a % 10 + b % 10
    carry = units // 10 ^ wrong
    tens = a // 10 + b // 10 + carry
    columns = f"{a % 10}{b % 10}0{units:02d} {a // 10}{b // 10}{carry}{tens:02d} "
    return f"{columns}={10 * tens + units % 10:03d}"


# --- product: four digits by two, which takes a calculator ---


def _product_problem(number: int) -> tuple[str, str]:
    a, b = 1000 + number // 90, 10 + number % 90
    return f"{a}*{b}", str(a * b)


def _product_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return a turn of a chat with the tool `calc`: the call, or the answer that copies its result. A wrong
    first turn guesses, which only luck makes right."""
    question, product = _product_problem(number)
    chat: list[Json] = [{"role": "user", "content": question}]
    if wrong:
        return chat, str(rng.randrange(10_000, 10**6))
    call = f"<calc>{question}</calc>"
    if rng.random() < 0.5:
        return chat, call
    result: Json = {"role": "user", "content": f"<result>{product}</result>"}
    return [*chat, {"role": "assistant", "content": call}, result], product


TASKS = {
    "sort": BuiltInTask(_sort_problem, _sort_demonstration, problems=10**6, wrong_share=0.7),
    "addition": BuiltInTask(_addition_problem, _addition_demonstration, problems=10**4, wrong_share=0.5),
    "product": BuiltInTask(_product_problem, _product_demonstration, problems=9000 * 90, wrong_share=0.5),
    "python": BuiltInTask(
        shown.power_problem, shown.power_demonstration, problems=shown.POWER_PROBLEMS, wrong_share=0.5
    ),
    "retool": BuiltInTask(
        shown.multiple_problem,
        shown.multiple_demonstration,
        problems=shown.MULTIPLE_PROBLEMS,
        wrong_share=0.6,
    ),
    "repair": BuiltInTask(
        shown.repair_problem,
        shown.repair_demonstration,
        problems=shown.REPAIRS,
        wrong_share=0.6,
        heldout=64,
        metadata=shown.repair_files,
    ),
    "repositories": BuiltInTask(
        repositories.repository_problem,
        None,
        problems=len(repositories.REPOSITORIES),
        wrong_share=0,
        heldout=6,
        metadata=repositories.repository_files,
    ),
    "guess": BuiltInTask(
        shown.guess_problem, shown.guess_demonstration, problems=shown.GUESS_PROBLEMS, wrong_share=0.4
    ),
    "nim": BuiltInTask(
        shown.nim_problem, shown.nim_demonstration, problems=shown.NIM_PROBLEMS, wrong_share=0.4, heldout=64
    ),
    "panel": BuiltInTask(shown.panel_problem, shown.panel_demonstration, problems=10**4, wrong_share=0.6),
    "search": BuiltInTask(
        lookups.search_problem,
        lookups.search_demonstration,
        problems=lookups.SEARCH_PROBLEMS,
        wrong_share=0.5,
        passages=lookups.search_passages,
    ),
    "shop": BuiltInTask(
        lookups.shop_problem, lookups.shop_demonstration, problems=lookups.SHOP_PROBLEMS, wrong_share=0.6
    ),
    "count": BuiltInTask(
        count_problem,
        count_demonstration,
        problems=COUNT_PROBLEMS,
        wrong_share=0.5,
        prompts=6000,
        heldout=128,
        demonstrations=160 * 64,  # as many as the preset takes; pictures take longer to draw than texts
    ),
    "debate": BuiltInTask(shown.panel_problem, shown.debate_demonstration, problems=10**4, wrong_share=0.6),
}
