"""Reads the configuration and the tokenizer of a model directory by transformers, and refuses those that it
cannot read, or that nobody could build, in one line: both may be files of anybody's."""

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from bus.errors import ConfigError, SluiceError, system_errors
from storage.model_files.families import refuse_older_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

AGAIN = "download the directory again, or name another by model.path"
GREETING = "Hello"
LONGEST_REASON = 300
"""Characters of a library's error that a refusal shows."""
HOSTS_NUMBERS = frozenset((
    errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ESTALE,
))  # fmt: skip
"""Numbers of the system's errors that are the host's, whatever is read."""
_IMPORTING = Lock()
"""Held for the first import of transformers, which fails in a second thread meanwhile: a process that keeps
the runs of several policies checks their prompts at the same time."""
_COUNT = re.compile("layer|depth|expert|head|group|window_pattern")
MOST_COUNTED = 100_000
"""Most layers, heads, experts or groups that a field of config.json may name."""
_BOUNDS = {
    "hidden_size": (1, 1_000_000),
    "vocab_size": (1, 100_000_000),
    "num_hidden_layers": (1, 1_000),
    "num_attention_heads": (1, 10_000),
    "num_key_value_heads": (0, 10_000),
    "head_dim": (0, 100_000),
    "intermediate_size": (0, 10_000_000),
    "moe_intermediate_size": (0, 10_000_000),
    "num_experts": (0, 10_000),
    "num_local_experts": (0, 10_000),
    "n_routed_experts": (0, 10_000),
    "num_experts_per_tok": (0, 10_000),
}
"""Smallest and largest values of sizes: far beyond those of any model, and small enough that a model of them
can be laid out without memory."""


def raw_config(directory: Path) -> dict[str, Any]:
    """Return what `config.json` says; nothing where it is missing or unreadable, which others tell."""
    try:
        found = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises inside into a `ConfigError` of one line: what cannot be done, what the
    library says, and the remedy. Our own errors pass, and those of a host that has nothing left, such as
    memory or descriptors: they say nothing of what is read."""
    try:
        yield
    except SluiceError:
        raise
    except Exception as error:
        if _is_of_host(error):
            raise
        said = " ".join(str(error).split())[:LONGEST_REASON]
        if not said or isinstance(error, ArithmeticError | AssertionError | LookupError | TypeError):
            said = f"{type(error).__name__} {said}".rstrip()  # such texts name a key, or nothing of the file
        raise ConfigError(f"{what}: {said}: {remedy}") from error


def _is_of_host(error: BaseException | None) -> bool:
    while error is not None:
        numbers = [error.errno] if isinstance(error, OSError) else []
        if isinstance(error, MemoryError) or HOSTS_NUMBERS.intersection([*numbers, *system_errors(error)]):
            return True
        error = error.__cause__ or error.__context__
    return False


def lack_of_model(directory: Path) -> str:
    """Return why this is no directory of a model; empty where it may be one."""
    if not directory.exists():
        return "there is no such directory"
    if not directory.is_dir():
        return "it is a file"
    return "" if (directory / "config.json").is_file() else "it has no config.json"


def read_config(directory: Path) -> "PretrainedConfig":
    """Return what `config.json` says, by transformers; programs in the directory are not run. Raises
    `ConfigError` when it is missing or unreadable, or names sizes that no model has."""
    file = directory / "config.json"
    if lack := lack_of_model(directory):
        raise ConfigError(f"{directory} is not a model directory: {lack}: {AGAIN}")
    with refusing(f"cannot read {file}", AGAIN):
        raw = json.loads(file.read_text())
        _refuse_counts(file, raw)
        with _IMPORTING:
            from transformers import AutoConfig, __version__
        found: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        text = found.get_text_config()
        for model_type in (found.model_type, text.model_type):
            refuse_older_transformers(model_type, __version__)
        for name, (least, most) in _BOUNDS.items():
            _refuse_size(file, name, getattr(text, name, None), least, most)
    return found


def _refuse_counts(file: Path, raw: object) -> None:
    """Refuse what is no object of settings, and counts that no model has, before transformers makes a list of
    so many layers."""
    if not isinstance(raw, dict):
        raise ConfigError(f"cannot read {file}: it is a {type(raw).__name__}, and no object: {AGAIN}")
    for name, value in raw.items():
        if isinstance(value, dict):
            _refuse_counts(file, value)
        elif _COUNT.search(name) and isinstance(value, int) and value > MOST_COUNTED:
            raise ConfigError(f"{file}: {name}={value} is above {MOST_COUNTED:,}: {AGAIN}")


def _refuse_size(file: Path, name: str, size: object, least: int, most: int) -> None:
    if size is None or isinstance(size, list | tuple):  # families of layers of different sizes list them
        return
    if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= most:
        raise ConfigError(f"{file}: {name}={size!r} is no size from {least} to {most:,}: {AGAIN}")


def context_of(hf_config: "PretrainedConfig", directory: Path) -> int:
    """Return the tokens of a model's context. Raises `ConfigError` for one that names none."""
    context = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ConfigError(
            f"{directory / 'config.json'}: max_position_embeddings={context!r} is no context: take a decoder "
            "with a bounded context, such as of Qwen3 or Llama"
        )
    return context


def read_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a directory, which has one. Raises `ConfigError` when it is unreadable."""
    with refusing(f"cannot read the tokenizer in {directory}", AGAIN):
        with _IMPORTING:
            from transformers import AutoTokenizer
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return found


def not_embedded(tokenizer: "PreTrainedTokenizerBase", token: int, vocabulary: int) -> str:
    """Say that a text has a token which the tokenizer adds to those of the model, and what to do."""
    return (
        f"it has {tokenizer.decode([token])!r}, which the tokenizer makes token {token}, and the model "
        f"embeds {vocabulary} tokens: leave it out of the text"
    )


def refuse_no_template(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Raise `ConfigError` for a tokenizer without a chat template, and for one that writes no conversation.
    Such a template is to blame for no prompt."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{directory}: the tokenizer has no chat template, by which prompts become text: take the "
            "instruction-tuned model of the family, or put the template of one as chat_template.jinja into "
            "the directory"
        )
    remedy = "mend chat_template.jinja, or take that of the model as its maker publishes it"
    with refusing(
        f"{directory}: the chat template writes not even a conversation of one user's message", remedy
    ):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": GREETING}], tokenize=False, add_generation_prompt=True
        )
    if GREETING not in text:
        raise ConfigError(
            f"{directory}: the chat template writes a user's message {GREETING!r} as {text[:60]!r}, without "
            f"its text, so that the model would see no prompt: {remedy}"
        )
