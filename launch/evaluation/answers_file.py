"""The answers of an evaluation, as they come: a file of JSON Lines, with which a later start goes on."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bus.codec import Json
from bus.errors import ConfigError
from storage.disk.atomic_files import try_lock, write_json

GREEDY = -1
"""Number of the greedy answer to a prompt, beside those of the sampled ones from 0."""


@dataclass(frozen=True, kw_only=True)
class EvaluationAnswer:
    """What came of one rollout."""

    data_set: str
    prompt: int
    """Place of the prompt in its data set, from 0."""
    sample: int
    """Number of the answer, `GREEDY` for the greedy one."""
    reward: float | None = None
    """None where something around the model failed."""
    end: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    tokens: int = 0
    """Tokens that were sampled; bytes where the tokenizer is not known."""
    turns: int = 0
    seconds: float = 0.0
    text: str = ""
    """All that was said, as the model's template has it."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.data_set, self.prompt, self.sample


class AnswersFile:
    """Answers that are kept in a directory, beside `evaluation.json`, which says what they are of."""

    def __init__(self, directory: Path) -> None:
        self.answers: dict[tuple[str, int, int], EvaluationAnswer] = {}
        """Answers so far. One that failed is asked for again."""
        self.failures: dict[str, list[str]] = {}
        """Why answers of each data set failed since this was opened."""
        self._directory = directory
        self._path = directory / "answers.jsonl"

    @contextmanager
    def opened(self, identity: Mapping[str, Json]) -> Iterator["AnswersFile"]:
        """Read the answers that are there, and let nobody else add to them while inside. Raises `ConfigError`
        for a directory with answers of another evaluation, or that somebody uses."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / ".lock").open("a") as lock:
            if not try_lock(lock):
                raise ConfigError(f"another `launch eval` writes to {self._directory}: name another --out")
            self._check(identity)
            self._read()
            yield self

    def add(self, answer: EvaluationAnswer) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(answer)) + "\n")
        if answer.failure:
            self.failures.setdefault(answer.data_set, []).append(answer.failure)
        self._keep(answer)

    def _check(self, identity: Mapping[str, Json]) -> None:
        noted = self._directory / "evaluation.json"
        given = json.loads(json.dumps(identity))
        if not noted.is_file():
            if self._path.is_file():
                raise ConfigError(f"{self._path} is of no evaluation that is known: name another --out")
            write_json(noted, given)
            return
        before = json.loads(noted.read_text())
        if other := sorted(name for name in {*before, *given} if before.get(name) != given.get(name)):
            raise ConfigError(
                f"{self._directory} has answers of another evaluation ({', '.join(other)} differ): name "
                "another --out, or remove it"
            )

    def _read(self) -> None:
        """Take the answers that are there; what a crash cut off is removed."""
        if not self._path.is_file():
            return
        whole = self._path.read_bytes()
        if (end := whole.rfind(b"\n") + 1) < len(whole):
            with self._path.open("r+b") as file:
                file.truncate(end)
        for line in whole[:end].splitlines():
            self._keep(EvaluationAnswer(**json.loads(line)))

    def _keep(self, answer: EvaluationAnswer) -> None:
        if answer.reward is not None:
            self.answers[answer.key] = answer
