"""What a storage service needs."""

import json
from pathlib import Path

from transformers import Qwen3Config

from bus.codec import Json
from bus.connection import Bus
from bus.messages import BlobRef, ModelFiles, PolicyManifest
from learner.initial.scratch_model import character_tokenizer
from storage.disk.run_directory import RunDirectory
from storage.model_files.packed_files import bundle
from storage.service import StorageSettings
from storage.settings.data import DataConfig
from storage.settings.replay import ReplayConfig
from tests.storage.serving import BLOB, SMALL


def write_prompts(path: Path, *contents: Json) -> Path:
    path.write_text("".join(json.dumps({"prompt": content}) + "\n" for content in contents))
    return path


def make_settings(
    tmp_path: Path, *contents: str, shards: int = 2, heldout: Path | None = None
) -> StorageSettings:
    prompts = write_prompts(tmp_path / "prompts.jsonl", *contents) if contents else None
    return StorageSettings(
        data=DataConfig(prompts=prompts, heldout=heldout),
        admission=SMALL,
        replay=ReplayConfig(shards=shards, linger_s=0.0),
        seed=0,
        max_new_tokens=10,
        run=RunDirectory(tmp_path / "runs", "test"),
        config_json='{"seed": 0}',
    )


async def publish_policy(bus: Bus, model: BlobRef) -> None:
    await bus.put(
        "policy", PolicyManifest(policy_version=0, incarnation="a", snapshot=BLOB, model=model, stage="rl")
    )


def files_of_a_model(directory: Path) -> ModelFiles:
    """Return the files of a model with a context of 32 tokens, one a character."""
    character_tokenizer().save_pretrained(directory)
    Qwen3Config(max_position_embeddings=32).save_pretrained(directory)
    return bundle(directory)
