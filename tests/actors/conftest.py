"""Tiny models and a character tokenizer."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from actors.weights import follow as weights
from bus.connection import Bus
from tests.actors.held_out import Evaluations
from tests.actors.sglang_served import FIRST
from tests.actors.tiny import tiny_model

Serve = Callable[..., AbstractAsyncContextManager[EmbeddedEngine]]

SPECIALS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)


@pytest.fixture
def quick(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors poll often, too."""
    monkeypatch.setattr(weights, "POLL_S", 0.1)


@pytest.fixture
async def evaluations(bus: Bus) -> Evaluations:
    """Asks for evaluations."""
    evaluations = Evaluations(bus)
    await evaluations.listen()
    return evaluations


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return tiny_model("qwen3", seed=0)


@pytest.fixture
def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of its weights, which a test may change."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def serve(model) -> Serve:
    """Run an engine over a model of its own (`load_weights` must not change the shared one)."""

    @asynccontextmanager
    async def serving(kind="qwen3", *, policy_version=0, **settings) -> AsyncIterator[EmbeddedEngine]:
        config = EmbeddedEngineConfig(**{"seed": 0, **settings})
        engine = EmbeddedEngine(tiny_model(kind, seed=0), config, policy_version=policy_version)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    return serving


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; chats look like <|user|>text<|assistant|>answer<|end|>.

    A policy may also sample "ab" as one token, which no text is ever tokenised to."""
    vocab = {
        token: number
        for number, token in enumerate((*SPECIALS, *"0123456789abcdefghijklmnopqrstuvwxyz +=", "ab"))
    }
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """What an SGLang server wants to know of the model before its weights come."""
    directory = tmp_path_factory.mktemp("model")
    FIRST.config.save_pretrained(directory)
    return directory
