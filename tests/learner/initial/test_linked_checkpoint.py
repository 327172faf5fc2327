"""A run begins with the weights of another run's checkpoint (`model.from_run`), optimizer by choice."""

import shutil
from dataclasses import asdict

import pytest
import torch

from bus.errors import ConfigError, LostDataError
from launch.checks.model_check import refuse_model
from launch.run_view.recorded_runs import recorded_runs
from launch.run_view.source_run import chosen_checkpoint, model_settings
from launch.services.learner import learner_settings
from launch.settings.run_config import RunConfig, validate
from learner.checkpoint.commit import save_checkpoint
from learner.data.packing import pack
from learner.initial.initial import prepare
from learner.model_directories.model_directory import load_tokenizer
from learner.progress.progress import Progress, checkpoint_step
from learner.run.restore import restore_alone
from storage.disk import checkpoints
from storage.disk.run_directory import RunDirectory
from tests.learner.mini_run import SCRATCH
from tests.learner.tiny import TIS, random_samples


def config_of(root, name, backend, **layer) -> RunConfig:
    optimizer = {"lr": 1e-2, "warmup_steps": 5}
    learner = {"backend": backend, "optimizer": optimizer, **layer.pop("learner", {})}
    model = {"scratch": SCRATCH.model_dump(), "dtype": "float32", **layer.pop("model", {})}
    return validate({"run": name, "directory": root, "learner": learner, "model": model, **layer})


def begun(config: RunConfig):
    """Return the backend with which a run begins, its progress and its model directory."""
    settings, _ = learner_settings(config, RunDirectory(config.directory, config.run))
    progress = Progress()
    return (
        restore_alone(settings, prepare(settings, None), None, progress),
        progress,
        settings.model_directory,
    )


def train(backend, seed: int) -> None:
    batches = pack(random_samples([9, 14, 5], seed=seed), 100)
    backend.train_step(batches, TIS, policy_version=0)


def weights(backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export().items()}


def differing(found, expected) -> list[str]:
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def source_run(root, backend: str, name: str = "sft"):
    """Make a run with checkpoints of steps 0 and 2; return its backend and the weights of each."""
    config = config_of(root, name, backend, seed=3)
    run = RunDirectory(root, name)
    run.config.write_text(config.model_dump_json())
    trained, _, _ = begun(config)
    saved = {}
    for step in (0, 2):
        trained.frozen.hold("reference")  # as after its supervised stage
        train(trained, step)
        extra = asdict(Progress(stage="done", warmup_step=7, step=step))
        save_checkpoint(trained, run.checkpoints, step, extra, keep=2)
        saved[step] = weights(trained)
    return trained, saved


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_it_begins_with_the_weights_of_the_checkpoint_to_the_bit(tmp_path, backend):
    trained, saved = source_run(tmp_path, backend)
    other = "fsdp" if backend == "megatron" else "megatron"
    newest, progress, directory = begun(config_of(tmp_path, "rl", other, model={"from_run": "sft"}))
    assert differing(weights(newest), saved[2]) == []
    assert (progress.step, progress.policy_version, progress.warmup_step) == (0, 0, 0)
    assert load_tokenizer(directory).get_vocab() == load_tokenizer(tmp_path / "sft/model").get_vocab()
    asked = {"from_run": "sft@2", "from_optimizer": True}
    drawn_back = {"loss": {"type": "ppo_clip"}, "reference": {"kl_coef": 0.1}}
    config = config_of(tmp_path, "on", backend, model=asked, learner=drawn_back)
    fresh, going_on = newest, begun(config)[0]
    with going_on.frozen.in_place("reference"):  # what the run begins with, not the other's
        assert differing(weights(going_on), saved[2]) == []
    first, _, _ = begun(config_of(tmp_path, "first", backend, model={"from_run": "sft@0"}))
    assert differing(weights(first), saved[0]) == []
    for one in (trained, fresh, going_on):
        train(one, seed=5)
    assert differing(weights(going_on), weights(trained)) == []
    assert len(differing(weights(fresh), weights(trained))) > 4
    shutil.rmtree(tmp_path / "sft")  # the other run has what it began with
    again, _, _ = begun(config_of(tmp_path, "rl", other, model={"from_run": "sft"}))
    assert differing(weights(again), saved[2]) == []
    (tmp_path / "rl/config.json").write_text('{"model": {"scratch": {"layers": 3}}}')
    assert model_settings(tmp_path, "rl", "sft")["scratch"]["layers"] == 3  # the other one is gone
    assert recorded_runs([tmp_path / "rl"])[0].origin == "sft@2"


def test_a_run_on_demonstrations_alone_has_checkpoints_by_the_steps_of_these(tmp_path):
    config = config_of(tmp_path, "sft", "fsdp", learner={"steps": 0}, warmup=demonstrations(tmp_path, 40))
    run = RunDirectory(tmp_path, "sft")
    run.config.write_text(config.model_dump_json())
    trained, _, _ = begun(config_of(tmp_path, "sft", "fsdp"))
    saved = {}
    for step in (10, 20, 40):
        train(trained, step)
        extra = asdict(Progress(stage="done" if step == 40 else "warmup", warmup_step=step))
        save_checkpoint(trained, run.checkpoints, checkpoint_step(extra), extra, keep=2)
        saved[step] = weights(trained)
    with pytest.raises(ConfigError, match="run 'sft' has no checkpoint of step 10: there are 20, 40;"):
        chosen_checkpoint(tmp_path, "sft@10")
    for named, step in (("sft@20", 20), ("sft", 40)):
        name = f"from-{step}"
        first, _, _ = begun(config_of(tmp_path, name, "fsdp", model={"from_run": named}))
        assert differing(weights(first), saved[step]) == []
        assert recorded_runs([tmp_path / name])[0].origin == f"sft@{step}"
        begun(config_of(tmp_path, name, "fsdp", model={"from_run": named}))


def demonstrations(directory, steps: int) -> dict:
    (directory / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    return {"demonstrations": directory / "rows.jsonl", "steps": steps}


def test_what_cannot_be_begun_with_is_refused_by_name(tmp_path):
    source_run(tmp_path, "fsdp")
    with pytest.raises(ConfigError, match=r"no run 'stf' in .*: did you mean 'sft'\?"):
        chosen_checkpoint(tmp_path, "stf")
    with pytest.raises(ConfigError, match="run 'sft' has no checkpoint of step 4: there are 0, 2;"):
        chosen_checkpoint(tmp_path, "sft@4")
    with pytest.raises(ConfigError, match=r"model\.from_run: it is RUN or RUN@STEP"):
        config_of(tmp_path, "rl", "fsdp", model={"from_run": "sft@last"})
    with pytest.raises(ConfigError, match="from_optimizer=true needs from_run"):
        config_of(tmp_path, "rl", "fsdp", model={"from_optimizer": True})
    larger = SCRATCH.model_copy(update={"layers": SCRATCH.layers + 1}).model_dump()
    with pytest.raises(ConfigError, match=r"is of another model: .*num_hidden_layers is"):
        refuse_model(config_of(tmp_path, "rl", "fsdp", model={"from_run": "sft", "scratch": larger}))
    assert not (tmp_path / "rl").exists()
    begun(config_of(tmp_path, "rl", "fsdp", model={"from_run": "sft@0"}))
    with pytest.raises(
        ConfigError, match="begun with the weights of sft@0 after 7 steps on demonstrations, not of"
    ):
        begun(config_of(tmp_path, "rl", "fsdp", model={"from_run": "sft@2"}))
    with pytest.raises(ConfigError, match="give --from sft again"):
        begun(config_of(tmp_path, "rl", "fsdp"))
    with pytest.raises(ConfigError, match="run 'sft' has begun with other weights than those of sft"):
        begun(config_of(tmp_path, "sft", "fsdp", model={"from_run": "sft"}))
    [file] = checkpoints.directory(tmp_path / "sft/checkpoints", 2).glob("*.distcp")
    torn = bytearray(file.read_bytes())
    torn[len(torn) // 2] ^= 1
    file.write_bytes(torn)
    with pytest.raises(LostDataError, match="are not those that were written"):
        begun(config_of(tmp_path, "late", "fsdp", model={"from_run": "sft"}))
    assert not (tmp_path / "late/model").exists()
