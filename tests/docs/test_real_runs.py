"""Configurations for real runs: each is one that a start accepts and that fits, as its page says.

published_configs.json has what the models' config.json say of their shapes."""

import json
import re
from pathlib import Path

import pytest

from launch.plan.plan import GIB, Question, plan, run_hf_config
from launch.settings.run_config import RunConfig, validate
from launch.settings.short_forms import sources_of
from launch.settings.sources import merged
from learner.backends.suitability import refuse_untrainable
from learner.metrics.gpus import GPUS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipes/real-runs.md").read_text()
FILES = sorted((ROOT / "docs/recipes/configs").glob("*.toml"))
MODELS = json.loads(Path(__file__).with_name("published_configs.json").read_text())


def resolved(file: Path, tmp_path: Path) -> RunConfig:
    """The settings of a file, with a directory that has config.json alone in place of the hub's model."""
    config = validate(merged(sources_of(None, [file], [], {})))
    (tmp_path / "config.json").write_text(json.dumps(MODELS[str(config.model.path)] | {"dtype": "bfloat16"}))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path})})


def row(file: Path, config: RunConfig) -> str:
    """What the page says of a file, as `launch plan` computes it on H200s."""
    gpus = int(re.search(r"-(\d+)gpus$", file.stem)[1])
    answers = config.sampling.max_new_tokens // 2
    found = plan(config, run_hf_config(config), Question(GPUS["h200"], gpus, 256, answers))
    assert found.fits, found.instead
    return (
        f"| [{file.stem}](configs/{file.name}) | {found.learner_gpus} and {found.engine_gpus} "
        f"| {found.rank.total / GIB:.0f} | {found.learner_host / GIB:.0f} "
        f"| {found.step_s:.0f} | {found.generation_s:.0f} |"
    )


def test_the_page_has_every_file():
    assert re.findall(r"\(configs/([^)]*)\)", PAGE) == [file.name for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_is_trained_fits_and_says_that_nobody_has_run_it(file: Path, tmp_path: Path):
    assert "Nobody has run this file." in file.read_text()
    config = resolved(file, tmp_path)
    refuse_untrainable(config.model, config.learner.backend, run_hf_config(config), config.learner.parallel)
    assert row(file, config) in PAGE
