"""Data sets named as on the Hugging Face hub, from a cache as its library leaves it, without a network."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from storage.prompt_files.hub_data import image_patterns
from tests.hub_server import COMMIT, NEWER, Repo, serving
from tests.pictures import image_part, picture

READ = {
    "hf://org/nums/main/train": [f"main/train-00000-of-00001.parquet:{n}" for n in range(3)],
    "hf://org/nums@main/main/test": [f"main/test-00000-of-00001.parquet:{n}" for n in range(2)],
    "hf://org/nums/main/train@[1:2]": ["main/train-00000-of-00001.parquet:1"],
    "hf://org/flat": [f"data/train-0000{m}-of-00002.parquet:{n}" for m in range(2) for n in range(2)],
    "hf://org/flat/train@[-1:]": ["data/train-00001-of-00002.parquet:1"],
}
"""Prompts by their name."""
REFUSED = {
    "hf://org/absent": ["hf://org/absent: the Hugging Face hub does not give", "a file or directory"],
    "hf://org/nums/main/validation": ["has no such split or file: there are test, train"],
    "hf://org/nums/other/train": ["has no such split or file: there are main"],
    "hf://nums": ["write a data set of the hub as hf://ORGANISATION/NAME[@REVISION][/SPLIT]"],
}
"""Words of the error by the name that leads nowhere."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of two data sets: one with directories of splits, one with its files in `data`."""
    home = tmp_path_factory.mktemp("home")
    for name, files in {
        "org--nums": {"main/train-00000-of-00001.parquet": 3, "main/test-00000-of-00001.parquet": 2},
        "org--flat": {"data/train-00000-of-00002.parquet": 2, "data/train-00001-of-00002.parquet": 2},
    }.items():
        place = home / f"hub/datasets--{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs/main").write_text(COMMIT)
        for file, rows in files.items():
            path = place / "snapshots" / COMMIT / file
            path.parent.mkdir(parents=True, exist_ok=True)
            table = {"prompt": [f"{file}:{n}" for n in range(rows)], "label": ["x"] * rows}
            pyarrow.parquet.write_table(pyarrow.table(table), path)
    return home


@pytest.fixture(scope="module")
def found(home: Path) -> dict[str, list[str] | str]:
    """What is read of the cache by each name, prompts or an error: one process loads the hub's client."""
    done = read([*READ, *REFUSED], home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read(names: list[str], home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Read prompts in a process of its own, since the hub's client reads its settings on import.

    Its last line has the prompts by name, or the error of a name that leads nowhere."""
    program = f"""
import json
from pathlib import Path
from bus.errors import ConfigError
from storage.settings.data import PromptKeys
from storage.prompt_files.dataset import load_prompts
def found(name):
    try:
        return [prompt.content for prompt in load_prompts(Path(name), PromptKeys())]
    except ConfigError as error:
        return str(error)
print(json.dumps({{name: found(name) for name in {names!r}}}))
"""
    own = {"HF_HOME": str(home), **(environment or {"HF_HUB_OFFLINE": "1"})}
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | own, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_split_of_a_data_set_is_read_from_the_cache(name: str, found: dict[str, list[str] | str]):
    assert found[name] == READ[name]


@pytest.mark.slow
def test_a_host_goes_on_with_the_commit_that_it_has_and_a_named_one_is_fetched(tmp_path: Path):
    repo = Repo("org/rows", {"train.jsonl": b'{"prompt": "1+1?", "label": "2"}\n'}, kind="datasets")
    with serving(repo) as hub:
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
        assert COMMIT in read(["hf://org/rows"], tmp_path, **place).stdout
        hub.newest = NEWER
        names = ["hf://org/rows/train", f"hf://org/rows@{NEWER}"]
        again = read(names, tmp_path, **place)
        assert again.returncode == 0, again.stderr
        kept, named, _ = again.stdout.splitlines()
        assert COMMIT in kept
        assert NEWER in named


@pytest.mark.slow
def test_images_that_rows_name_are_fetched_with_those_beside_them_and_no_others(tmp_path: Path):
    rows = [
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": f"../shapes/{n}.png"}]}]}
        for n in range(2)
    ]
    files = {
        "data/train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        **{f"shapes/{n}.png": picture(seed=n) for n in range(3)},
        "shapes/more/4.png": picture(seed=4),
        "shapes/large.bin": b"not wanted",
        "others/5.png": picture(seed=5),
    }
    with serving(Repo("org/shapes", files, kind="datasets")) as hub:
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
        found = read(["hf://org/shapes/train"], tmp_path, **place)
    assert found.returncode == 0, found.stderr
    [prompts] = json.loads(found.stdout.splitlines()[-1]).values()
    assert [one[0]["content"][0] for one in prompts] == [image_part(picture(seed=n)) for n in range(2)]
    [snapshot] = tmp_path.glob("hub/datasets--org--shapes/snapshots/*")
    here = {str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if not file.is_dir()}
    assert here == {"data/train.jsonl", *(f"shapes/{name}.png" for name in ("0", "1", "2", "more/4"))}


@pytest.mark.slow
def test_images_in_many_directories_are_one_question_to_the_hub(tmp_path: Path):
    """A row names its own in a column, among some that need no file."""
    rows = [
        {"prompt": "<image>What?", "label": "", "images": [{"path": f"shapes/{n}/a.png"}]} for n in range(3)
    ]
    shown = {"type": "image", "image": "shapes/3/a.png"}
    rows += [
        {"prompt": [{"role": "user", "content": [shown, image_part(picture(seed=9))]}], "label": ""},
        {"prompt": "1+1?", "label": ""},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {"train.jsonl": lines, **{f"shapes/{n}/a.png": picture(seed=n) for n in range(5)}}
    with serving(Repo("org/shapes", files, kind="datasets")) as hub:
        found = read(["hf://org/shapes"], tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
    [prompts] = json.loads(found.stdout.splitlines()[-1]).values()
    assert [one[0]["content"][0] for one in prompts[:4]] == [image_part(picture(seed=n)) for n in range(4)]
    questions = [path for path in hub.asked if path.startswith("/api/datasets/") and COMMIT in path]
    assert len(questions) == 1, "rows are looked for by the name of a branch"
    assert not any("shapes/4/" in path for path in hub.asked), "no row names it"


def test_images_of_very_many_directories_are_few_patterns_that_match_them_all():
    assert image_patterns(["a/x.png", "a/y.png", "b[1]/z.png", "c/plain", "top.jpg"]) == (
        "*.jpg", "a/*.png", "b[[]1]/*.png", "c/plain",
    )  # fmt: skip
    files = [f"shapes/{n}/{name}" for n in range(1000) for name in ("a.png", "b.jpg", str(n))]
    found = image_patterns([*files, "maps/1/m.png"])
    assert set(found) == {"shapes/*.png", "shapes/*.jpg", "shapes/*", "maps/*.png"}
    assert all(any(fnmatchcase(file, pattern) for pattern in found) for file in files)
    at_the_top = image_patterns(str(n) for n in range(1000))
    assert at_the_top == ("*",)


@pytest.mark.slow
def test_an_image_that_the_hub_does_not_have_is_refused_with_its_row(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}], "label": ""}
    files = {"train.jsonl": json.dumps(row).encode(), "yes.png": picture()}
    with serving(Repo("org/shapes", files, kind="datasets")) as hub:
        found = read(["hf://org/shapes"], tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
    said = found.stdout.splitlines()[-1]
    assert "train.jsonl, line 1: 'prompt': the image" in said
    assert "no.png cannot be read (No such file or directory): check the path" in said


@pytest.mark.slow
def test_a_download_that_breaks_off_is_an_error_with_its_remedy(tmp_path: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=_break_off, args=(listener,), daemon=True).start()
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        done = read(["hf://org/rows"], tmp_path, **place)
    [said] = json.loads(done.stdout.splitlines()[-1]).values()
    assert said.startswith("hf://org/rows: the Hugging Face hub does not give"), said


def _break_off(listener: socket.socket) -> None:
    """Answer each request with less than is announced, until the listener is closed."""
    with suppress(OSError):
        while True:
            with listener.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_leads_nowhere_is_an_error_with_its_remedy(name: str, found: dict[str, list[str] | str]):
    said = found[name]
    assert isinstance(said, str)
    assert all(word in said for word in REFUSED[name]), said
