"""What the preset, the files, the environment and the short forms of a start stand for, as settings."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bus.config import URL_VARIABLE
from bus.errors import ConfigError
from bus.security.credentials import VARIABLE, load_credentials
from launch.settings.run_config import RunConfig, config_file, flags, preset
from launch.settings.sources import DEFAULT, Source, merged
from learner.config.loss import DPOLoss
from learner.config.warmup import WarmupConfig


def sources_of(
    preset_name: str | None,
    configs: Sequence[Path] | None,
    short: Sequence[Source],
    settings: object,
    *,
    recipe: Source | None = None,
) -> list[Source]:
    """Return the settings of a start in their order, the last wins: the preset, the recipe, each file, the
    environment and the short forms, the flags. Before them stand the types of all tables by default: a preset
    need not repeat these, and a later layer that chooses another type must still replace its table."""
    return [
        Source(DEFAULT, _types(RunConfig().model_dump())),
        *([Source(f"preset {preset_name}", preset(preset_name))] if preset_name else []),
        *([recipe] if recipe else []),
        *(Source(f"file {path}", config_file(path)) for path in configs or ()),
        *short,
        Source("flag", flags(settings)),
    ]


def _types(table: Mapping[str, Any]) -> dict[str, Any]:
    below = {name: _types(value) for name, value in table.items() if isinstance(value, Mapping)}
    own = {"type": table["type"]} if isinstance(table.get("type"), str) else {}
    return own | {name: found for name, found in below.items() if found}


def short_sources(
    bus: str | None = None, creds: Path | None = None, prompts: Path | None = None,
    reward: str | None = None, agent: str | None = None, from_run: str | None = None,
) -> list[Source]:  # fmt: skip
    environment: dict[str, Any] = {}
    if agent is not None:
        environment = {"type": "agent", "command": agent, "reward": "posted"}
    given: dict[str, dict[str, Any]] = {
        "--from": {"model": {"from_run": from_run}} if from_run is not None else {},
        "--prompts": {"data": {"prompts": prompts}} if prompts is not None else {},
        "--agent": {"actors": {"environment": environment}} if environment else {},
        "--reward": {"actors": {"environment": {"reward": reward}}} if reward is not None else {},
    }
    return [
        *_bus_sources(bus, creds),
        *(Source(f"flag {name}", layer) for name, layer in given.items() if layer),
    ]


def supervised_sources(sft: Path | None, pairs: Path | None, others: Mapping[str, Any]) -> list[Source]:
    """Return the settings of `--sft` or `--pairs`: a run that trains on demonstrations or on pairs of answers
    alone, once over, at a rate for a model that was trained before. `others` are the settings of all other
    sources. Raises `ConfigError` for both, and for demonstrations that cannot be read."""
    file = sft or pairs
    if file is None:
        return []
    if sft and pairs:
        raise ConfigError(
            f"--sft {sft} with --pairs {pairs}: a run trains on one of them; begin another with the model "
            "that the first leaves in its export"
        )
    from storage.prompt_files.rows import read_rows  # loads pyarrow, which no help needs

    rows = sum(1 for _ in read_rows(file))
    batch_size = WarmupConfig().batch_size
    with suppress(ValidationError, KeyError):  # a wrong size is refused with all settings
        given = {"batch_size": others["warmup"]["batch_size"]}  # a flag's is a text
        batch_size = WarmupConfig.model_validate(given).batch_size
    steps = -(-rows // batch_size)
    optimizer = {"lr": 2e-5, "warmup_steps": min(10, steps // 10)}
    warmup: dict[str, Any] = {
        "demonstrations": file,
        "steps": steps,
        "batch_size": min(batch_size, rows),
        "optimizer": optimizer,
    }
    loss = others["warmup"]["loss"]["type"] if pairs else None
    if loss == WarmupConfig().loss.type:
        loss = DPOLoss().type
        warmup["loss"] = {"type": loss}
    if loss == DPOLoss().type:
        optimizer["lr"] = 1e-6
    return [Source("--sft" if sft else "--pairs", {"warmup": warmup, "learner": {"steps": 0}})]


def _bus_sources(bus: str | None, creds: Path | None) -> list[Source]:
    """Return who names the bus and the credentials; a bus that nobody names is that of the credentials."""
    url, file = os.environ.get(URL_VARIABLE), os.environ.get(VARIABLE)
    named = bus or url
    found = []
    if creds is None and file:
        found.append(Source(f"environment {VARIABLE}", _credentials_layer(Path(file), named)))
    if url:
        found.append(Source(f"environment {URL_VARIABLE}", {"bus": {"url": url}}))
    if creds is not None:
        found.append(Source("flag --creds", _credentials_layer(creds, named)))
    if bus:
        found.append(Source("flag --bus", {"bus": {"url": bus}}))
    return found


def _credentials_layer(path: Path, bus: str | None) -> dict[str, Any]:
    url = {} if bus else {"url": load_credentials(path).url}
    return {"bus": {"creds": path.absolute(), **url}}


def short_forms(
    bus: str | None = None, creds: Path | None = None, prompts: Path | None = None,
    reward: str | None = None, agent: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    return merged(short_sources(bus, creds, prompts, reward, agent))
