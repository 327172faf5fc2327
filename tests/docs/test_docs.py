"""Checks that what the docs name exists: files, headings, commands, flags, settings, modules."""

import ast
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from tomllib import loads

import pytest
from cyclopts import App
from pydantic import BaseModel

from launch.cli import main as cli
from launch.settings.run_config import RunConfig, validate
from storage.model_files.families import families_with
from tests.docs.documented_commands import all_commands, exists, fields

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
}
ROOMS = ("bus", "storage", "actors", "learner", "launch", "tests", "docs")
LONGEST_LINE = 110
LONGEST_ROW = 160
"""Markdown has no line breaks inside a table's row."""

OTHER_PROGRAMS = {
    "--custom-generate-function-path",
    "--custom-rm-path",
    "--custom-weight-loader",
    "--dynamic-sampling-filter-path",
    "--enable-lora",
    "--enable-mtp-training",
    "--enable-return-routed-experts",
    "--gpus",
    "--incremental-streaming-output",
    "--lora-backend",
    "--hf-checkpoint",
    "--mask-offpolicy-in-partial-rollout",
    "--max-weight-staleness",
    "--mtp-loss-scaling-factor",
    "--model-path",
    "--n-samples-per-prompt",
    "--over-sampling-batch-size",
    "--partial-rollout",
    "--rollout-batch-size",
    "--rollout-max-response-len",
    "--rollout-temperature",
    "--save-debug-rollout-data",
    "--shm-size",
    "--sglang-mem-fraction-static",
    "--stream-interval",
    "--tensor-model-parallel-size",
    "--tis-clip",
    "--use-tis",
}
"""Flags of SGLang's server, and of frameworks that readers come from."""
OTHER_COMMANDS = r"docker|kubectl|pytest|sbatch|sglang\.launch|srun|systemctl|torchrun"

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
GROUPS = frozenset({"bench", "convert", "engines", "keys", "runs"})
"""Commands that only have commands below them."""
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join(ROOMS)})/[\w./-]*\w/?")
SETTING = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks in one of `languages`."""
    return [dedent(block) for language, block in FENCE.findall(text) if language in languages]


def code(text: str) -> Iterator[str]:
    """All that is set as code: fenced blocks, then spans within lines."""
    yield from (block for _, block in FENCE.findall(text))
    yield from SPAN.findall(FENCE.sub("", text))


@pytest.fixture(params=PAGES, scope="module")
def page(request: pytest.FixtureRequest) -> Path:
    return PAGES[request.param]


@pytest.fixture
def text(page: Path) -> str:
    return page.read_text()


def test_what_a_reader_copies_has_no_prompt_of_a_shell(text: str):
    assert [line for line in text.splitlines() if line.startswith("$ ")] == []


def test_lines_are_short(text: str):
    limits = ((line, LONGEST_ROW if line.startswith("|") else LONGEST_LINE) for line in text.splitlines())
    assert [line for line, limit in limits if len(line) > limit] == []


def test_files_exist(text: str):
    others = re.sub(r"^```python\n# \S+$", "", text, flags=re.MULTILINE)  # examples name new files
    assert [path for path in sorted(set(PATH.findall(others))) if not (ROOT / path).exists()] == []


def test_links_lead_somewhere(page: Path, text: str):
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file) if file else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


@cache
def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_page_is_linked_from_the_readme():
    linked = {target.partition("#")[0] for target in LINK.findall(PAGES["README.md"].read_text())}
    assert set(PAGES) - linked - {"README.md"} == set()


@pytest.mark.parametrize(
    "source", sorted((ROOT / "docs" / "pictures").glob("*.toml")), ids=lambda path: path.stem
)
def test_pictures_are_drawn_from_sources_that_name_files_there_are(source: Path):
    draw = runpy.run_path(str(source.parent / "draw.py"))
    assert source.with_suffix(".svg").read_text() == draw["drawn"](source), "python docs/pictures/draw.py"
    assert source.with_suffix(".svg").name in PAGES["docs/architecture.md"].read_text()
    steps = loads(source.read_text())["step"]
    assert [step["file"] for step in steps if not (ROOT / step["file"]).is_file()] == []


# --- the command line ---


def commands(text: str) -> Iterator[list[str]]:
    """Each `launch ...` of console blocks and spans, as words, without what follows a pipe or a comment."""
    shells = "\n".join(blocks(text, "console", "sh", "bash")).replace("\\\n", " ").splitlines()
    for line in (*shells, *SPAN.findall(FENCE.sub("", text))):
        for part in re.split(r"[|;]", line.split("  #")[0]):
            words = part.replace("'", "").replace('"', "").split()
            if "launch" in words[:3] and words[words.index("launch") - 1 : words.index("launch")] != ["cd"]:
                yield words[words.index("launch") + 1 :]


@cache
def flags_of(*path: str) -> frozenset[str]:
    """The flags of one command."""
    app: App = cli.app
    for name in path:
        app = app[name]
    return frozenset(name for argument in app.assemble_argument_collection() for name in argument.names)


@cache
def flags_by_command() -> dict[tuple[str, ...], frozenset[str]]:
    return {path: flags_of(*path) for path in all_commands(cli.app)}


def known(flag: str, flags: Iterable[str]) -> bool:
    """Tell whether a command has `flag`, or an ancestor of it that is a table with free keys."""
    return any(flag == name or (flag.startswith(f"{name}.") and is_free(name)) for name in flags)


def is_free(flag: str) -> bool:
    """Tell whether a setting is a table with keys of the user's choice."""
    free = {"server", "environment", "prefill", "decode", "settings", "--policies"}
    return flag.rpartition(".")[2] in free


def test_commands_have_their_flags(text: str):
    for words in commands(text):
        if not words or not words[0].isalpha():
            continue
        path = tuple(words[: 2 if words[0] in GROUPS else 1])
        if len(path) == 1 and path[0] in GROUPS:
            continue
        assert path in flags_by_command(), f"launch {' '.join(words)}"
        flags = set(FLAG.findall(" ".join(words))) - {"--help"}
        wrong = [flag for flag in flags if not known(flag, flags_by_command()[path])]
        assert wrong == [], f"launch {' '.join(words)}"


def test_flags_exist(text: str):
    every = frozenset.union(*flags_by_command().values())
    others = "\n".join(
        part
        for part in code(text)
        if not re.search(r"sbatch|scancel|docker|kubectl|helm |systemctl|torchrun|pytest|sglang.launch", part)
    )
    assert [
        flag for flag in set(FLAG.findall(others)) - OTHER_PROGRAMS - {"--help"} if not known(flag, every)
    ] == []


def test_make_targets_and_modules_exist(text: str):
    makefile = (ROOT / "Makefile").read_text()
    for part in code(text):
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", part):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for module in re.findall(r"\bpython -m ([\w.]+)", part):
            assert module.startswith("sglang") or find_spec(module), module


# --- settings ---


def test_settings_exist(text: str):
    first = set(RunConfig.model_fields)
    named = {
        match.group()
        for span in SPAN.findall(FENCE.sub("", text))
        if (match := SETTING.match(span)) and match.group().split(".")[0] in first
    }
    files = {name for name in named if name.endswith((".py", ".json", ".jsonl", ".md", ".toml"))}
    modules = {name for name in named if find_spec_or_none(name)}
    assert [name for name in sorted(named - files - modules) if not exists(name)] == []


def find_spec_or_none(name: str) -> object:
    """The module of that name, or the one that a dotted attribute of it is in."""
    try:
        return find_spec(name) or find_spec(name.rpartition(".")[0])
    except ModuleNotFoundError:
        return None


def types(setting: str) -> set[str]:
    """What `type` of a table may be, by the literals of its union."""
    section: object = RunConfig
    for name in setting.split("."):
        section = fields(section)[name]
    members = [member for member in getattr(section, "__args__", ()) if issubclass(member, BaseModel)]
    return {name for member in members for name in member.model_fields["type"].annotation.__args__}  # type: ignore[union-attr]


def keys(file: str, *names: str) -> set[str]:
    """Keys of the tables of these names in a module, which is not imported."""
    tables = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.AnnAssign)]
    found = {ast.unparse(node.target): node.value for node in tables}
    return {key.value for name in names for key in found[name].keys}  # type: ignore[union-attr]


FIRST_CELL = re.compile(r"^\| (`.*?) \|", re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "head", "there"),
    [
        ("objectives", "`learner.loss.type`", lambda: types("learner.loss")),
        ("objectives", "`learner.rejection.type`", lambda: types("learner.rejection")),
        ("objectives", "`learner.aggregation.type`", lambda: types("learner.aggregation")),
        ("advantages", "`type`", lambda: types("learner.advantage")),
        ("environments", "game", lambda: types("actors.environment.game")),
        ("environments", "preset", lambda: {file.stem for file in (ROOT / "launch/presets").glob("*.toml")}),
        ("rewards", "name", lambda: keys("actors/rewards/builtin/registry.py", "REWARDS", "CONFIGURED")),
        ("models", "`model_type`", lambda: set(families_with(lambda family: family.megatron))),
    ],
)
def test_tables_of_what_is_built_in_are_whole(page: str, head: str, there: Callable[[], set[str]]):
    _, _, below = PAGES[f"docs/{page}.md"].read_text().partition(f"\n| {head} |")
    listed = {name for cell in FIRST_CELL.findall(below.split("\n\n")[0]) for name in SPAN.findall(cell)}
    assert listed - {"plugin"} == there() - {"plugin", "auto", "none"}


def test_toml_is_accepted(text: str):
    for block in blocks(text, "toml"):
        validate(loads(block))


# --- Python ---


def test_python_compiles_and_imports_what_is_there(text: str):
    for block in blocks(text, "python"):
        tree = compile(block, "docs", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ROOMS:
                there = defined_in(str(node.module))
                assert [alias.name for alias in node.names if alias.name not in there] == [], node.module


@cache
def defined_in(module: str) -> frozenset[str]:
    """Names that one of our modules defines or exports. It is not imported: torch would take seconds."""
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text())
    exported = [
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    ]
    return frozenset(exported).union(
        name
        for node in tree.body
        for name in (
            [node.name]
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            else [target.id for target in ast.walk(node) if isinstance(target, ast.Name)]
        )
    )
