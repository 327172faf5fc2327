"""The preset `repositories` from the command line, with the published model of a recipe."""

import pytest

from launch.recipes.recipe import recipe
from tests.e2e.commands import Command, assert_whole

STEPS, GROUPS, SAMPLES = 2, 1, 4
SHORT = (
    "--sampling.max-new-tokens", "32", "--evaluation.every-versions", "0",
    "--learner.steps", str(STEPS), "--admission.groups-per-step", str(GROUPS),
    "--admission.samples-per-prompt", str(SAMPLES),
)  # fmt: skip


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.nightly
def test_a_published_model_of_135_million_weights_trains_in_sandboxes(tmp_path):
    published = recipe("sums")
    published.prepare()  # SmolLM2 has no template for tools: it is told how their calls are written
    model = ("--model.path", str(published.directory / "model"), "--actors.tool-calls", "hermes")
    run = Command(tmp_path, "local", "--preset", "repositories", "--directory", str(tmp_path), *model, *SHORT)
    try:
        assert run.wait(timeout_s=1200) == 0, run.said()
    finally:
        run.kill()
    assert_whole(tmp_path / "repositories", STEPS, GROUPS, SAMPLES)
