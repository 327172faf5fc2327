"""Settings that a vision-language model needs, before anything is loaded, and what is counted for one."""

from pathlib import Path

from bus.errors import ConfigError
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_on_disk
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.model_files.families import family_named
from storage.model_files.model_reading import raw_config


def refuse_unfit_vision(config: RunConfig) -> None:
    """Raise `ConfigError` for settings under which a vision-language model would not be trained on images. A
    model on another host is not seen from here: learner and actors refuse it when they load it."""
    if (found := _vision_model(config)) is None:
        return
    model, model_type = found
    problems = []
    if config.learner.backend != "fsdp":
        problems.append(
            f'learner.backend={config.learner.backend} trains text models alone: set it to "fsdp"'
        )
    if not config.actors.engine.in_process or config.actors.evaluation.has_own_servers:
        problems += config.actors.engine.servers.unfit_for_images(model_type)
    if config.model.numerics != "fast":
        problems.append(f"model.numerics={config.model.numerics} is for text models: set it to fast")
    if not family_named(model_type).takes_adapters and config.learner.lora.exists:
        problems.append(
            f"learner.lora.rank={config.learner.lora.rank}: files of a {model_type} know its layers by other "
            "names than transformers, by which nobody would find adapters: set it to 0"
        )
    if (problem := config.learner.unseeing_teachers) is not None:
        problems.append(problem)
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"{model} is a vision-language model (docs/vision.md):\n{listed}")


def counts_images(config: RunConfig) -> bool:
    """Tell whether the learner balances its ranks by work of which the images of groups may be a part. A
    model on another host is not seen from here: it may see some."""
    if config.learner.batch.balance != "flops":
        return False
    unseen = config.model.path is not None and not raw_config(_directory(config, config.model.path))
    return unseen or _vision_model(config) is not None


def _directory(config: RunConfig, path: Path) -> Path:
    return model_on_disk(pinned(path, RunDirectory(config.directory, config.run)))


def _vision_model(config: RunConfig) -> tuple[str, str] | None:
    """Return the name and the `model_type` of the run's model if it is known to see images."""
    if config.model.path is None:
        named = "the scratch model with model.scratch.vision.layers"
        return (named, "qwen3_vl") if config.model.scratch.vision.layers else None
    model_type = raw_config(_directory(config, config.model.path)).get("model_type")
    return (str(config.model.path), str(model_type)) if family_named(model_type).sees_images else None
