"""The model that `launch try` and `launch eval` ask: a directory, a checkpoint, or a server by its URL."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from actors.engines.base import Engine
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fleet.build import engine_builds, refuse_unfit_model
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.gpu_plan import gpu_plan
from actors.environments.base import Environment, RunsOnDemand
from actors.evaluation.chat_endpoint import ChatEndpoint
from actors.other_policies.opponent_weights import state_of_files
from actors.policy.chat_format import Tokenizer
from actors.settings.evaluation import ChatEndpointConfig
from bus.errors import ConfigError
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_directory
from launch.run_view.source_run import described_by, is_of_fsdp, newest_checkpoint
from launch.settings.run_config import RunConfig
from storage.chats.stop_tokens import stop_token_ids
from storage.disk.run_directory import RunDirectory
from storage.images.chat import ImageChat
from storage.model_files.model_reading import read_tokenizer, refuse_no_template
from storage.model_files.weight_files import weight_files

BYTES_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %} {{ c['function'] | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass(frozen=True)
class AnsweringModel:
    """A model that is ready to answer."""

    engine: Engine
    tokenizer: Tokenizer
    stops: Sequence[int]
    images: ImageChat | None
    name: str
    """What the model is, for a human and to tell results of other models apart."""

    def text(self, token_ids: np.ndarray) -> str:
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)


@contextmanager
def directory_of_checkpoint(source: Path | None, config: RunConfig) -> Iterator[RunConfig]:
    """Yield settings whose model is the one in a checkpoint, in a directory of several or in that of a run;
    the settings as they are without `source`. Raises `ConfigError` or `StorageError` for what is no whole
    checkpoint."""
    if source is None:
        yield config
        return
    from learner.convert.fsdp import fsdp_to_hf
    from learner.convert.megatron import megatron_to_hf

    found = newest_checkpoint(source)
    given = config.model.path
    described = described_by(found) if given is None else model_directory(given)
    if described is None:
        raise ConfigError(f"{found} has no tokenizer: name the directory of its model by --model.path")
    with TemporaryDirectory(prefix="sluice-checkpoint-") as scratch:
        target = Path(scratch) / "model"
        (fsdp_to_hf if is_of_fsdp(found) else megatron_to_hf)(found, target, described)
        yield config.model_copy(update={"model": config.model.model_copy(update={"path": target})})


def refuse_clients(environment: Environment) -> None:
    """Raise `ConfigError` for an environment whose tasks others take."""
    if isinstance(environment, RunsOnDemand):
        raise ConfigError("actors.environment.type=clients: its tasks are taken by clients; choose another")


def refuse_other_policies(config: RunConfig) -> None:
    """Raise `ConfigError` where episodes need other policies, whose part the one model would play."""
    named = {name for one in config.actors.by_name.values() for name in one.opponents_named}
    if found := sorted({*named, *config.actors.opponents, *config.policies}):
        raise ConfigError(
            f"{', '.join(found)}: episodes with opponents or several policies need a run, since one model "
            "alone answers here; leave actors.opponents and policies out"
        )


@asynccontextmanager
async def answering_model(
    config: RunConfig, endpoint: ChatEndpointConfig | None, name: str = "", *, embedded: bool = False
) -> AsyncIterator[AnsweringModel]:
    """Start what answers, and close it at the end: `endpoint`, or else the model of the settings on the
    engines of `actors.engine`, or with `embedded` in this process. `name` says what the model is, where its
    path does not.

    Raises `ConfigError` where there is no model, and `EngineError` for engines that do not start."""
    if config.model.from_run is not None:
        raise ConfigError(
            "model.from_run is for a run that trains: `launch eval --checkpoint` measures a checkpoint"
        )
    run = RunDirectory(config.directory, config.run)
    model = None if config.model.path is None else model_directory(pinned(config.model.path, run))
    if endpoint is None and model is None:
        raise ConfigError("there is no model to ask: name one by --model.path or --url")
    disable_progress_bar()
    tokenizer = bytes_tokenizer()
    stops: Sequence[int] = ()
    if model is not None:
        if endpoint is None:
            weight_files(model)  # raises where there are none
        tokenizer = read_tokenizer(model)
        refuse_no_template(tokenizer, model)
        stops = stop_token_ids(model, tokenizer)
    with TemporaryDirectory(prefix="sluice-engines-") as logs:
        engine = await _built(config, model, endpoint, Path(logs), embedded=embedded)
        await engine.start()
        try:
            if isinstance(engine, Fleet) and model is not None:
                await engine.load_weights(await asyncio.to_thread(state_of_files, model), 0)
            images = None if model is None else ImageChat.of(model, tokenizer)
            called = f"{endpoint.model} at {endpoint.url}" if endpoint else name or str(model)
            yield AnsweringModel(engine, tokenizer, stops, images, called)
        finally:
            await engine.close()


async def _built(
    config: RunConfig, model: Path | None, endpoint: ChatEndpointConfig | None, logs: Path, *, embedded: bool
) -> Engine:
    if endpoint is not None:
        return ChatEndpoint("url", endpoint)
    assert model is not None  # `answering_model` has refused that
    engine = config.actors.engine
    if embedded or engine.in_process:
        return await asyncio.to_thread(
            EmbeddedEngine.from_directory, model, engine.embedded, policy_version=0
        )
    if engine.attached:
        raise ConfigError(
            "actors.engine attaches to servers that run, whose weights would be replaced: ask such a server "
            "by --url, or leave out actors.engine.url"
        )
    refuse_unfit_model(engine, model)
    gpus = {f"engine-{number}": gpu for number, gpu in enumerate(gpu_plan(config.actors).rollouts)}
    return Fleet(engine_builds(engine, model, gpus, logs, actor="eval"), config.actors.fleet)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte, in which texts of a server whose tokenizer is not known are
    kept."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={character: n for n, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = BYTES_TEMPLATE
    return tokenizer
