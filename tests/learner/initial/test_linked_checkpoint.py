"""A run begins with the weights of another run's checkpoint (`model.from_run`), optimizer by choice."""

import shutil
from dataclasses import asdict
from math import log

import pytest
import torch

from bus.errors import ConfigError, LostDataError
from launch.checks.model_check import refuse_model
from launch.run_view.recorded_runs import recorded_runs
from launch.run_view.source_run import chosen_checkpoint, model_settings, told_beginning
from launch.services.learner import learner_settings
from launch.settings.run_config import RunConfig, validate
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.parallel import UNDIVIDED
from learner.data.packing import pack
from learner.initial.initial import prepare
from learner.model_directories.model_directory import load_tokenizer, save_hf_directory
from learner.progress.progress import Progress, checkpoint_step
from learner.run.restore import restore_alone, restore_backend
from learner.step.warmup import warm_up_step
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


@pytest.mark.first(1, others=pytest.mark.slow)
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


LORA = {"rank": 4, "alpha": 6.0}


def run_with_adapters(root, backend: str, lora: dict):
    """Make a run whose checkpoint has adapters; return its backend and the weights that they make."""
    config = config_of(root, "sft", backend, seed=3, learner={"lora": lora})
    run = RunDirectory(root, "sft")
    run.config.write_text(config.model_dump_json())
    trained, _, _ = begun(config)
    for step in range(2):
        train(trained, step)
    save_checkpoint(trained, run.checkpoints, 2, asdict(Progress(stage="rl", step=2)), keep=2)
    return trained, weights(trained)


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_same_adapters_go_on(tmp_path, backend):
    trained, saved = run_with_adapters(tmp_path, backend, LORA)
    drawn_back = {"loss": {"type": "ppo_clip"}, "reference": {"kl_coef": 0.1}, "lora": LORA}
    config = config_of(tmp_path, "rl", backend, model={"from_run": "sft"}, learner=drawn_back)
    assert (
        told_beginning(config) == "Run 'rl' begins with the adapters of run sft, which are trained further."
    )
    refuse_model(config)
    fresh, _, _ = begun(config)
    asked = {"from_run": "sft", "from_optimizer": True}
    going_on, _, _ = begun(config_of(tmp_path, "on", backend, model=asked, learner={"lora": LORA}))
    shutil.rmtree(tmp_path / "sft")  # the other run has what it began with
    again, _, _ = begun(config)
    for one in (fresh, going_on, again):
        assert differing(weights(one), saved) == []
    with fresh.frozen.in_place("reference"):  # what the run begins with, not the model without adapters
        assert differing(weights(fresh), saved) == []
    train(trained, seed=5)
    train(going_on, seed=5)
    assert differing(weights(going_on), weights(trained)) == []
    assert len(differing(weights(going_on), saved)) > 4
    load_checkpoint(trained, tmp_path / "rl/model/adapters")
    trained.set_optimizer(fresh.optimizer_config)
    for one in (fresh, trained):
        train(one, seed=5)
    assert differing(weights(fresh), weights(trained)) == []
    run = RunDirectory(tmp_path, "rl")
    run.config.write_text(config.model_dump_json())
    save_checkpoint(fresh, run.checkpoints, 1, asdict(Progress(stage="rl", step=1)), keep=1)
    later, _, _ = begun(config_of(tmp_path, "later", backend, model={"from_run": "rl"}))
    assert differing(weights(later), weights(fresh)) == []


@pytest.mark.parametrize(
    ("lora", "backend"),
    [(LORA, "megatron"), ({**LORA, "weight_decomposed": True}, "fsdp")],
    ids=["plain-megatron", "dora-fsdp"],
)
def test_other_adapters_are_merged_into_the_weights(tmp_path, backend, lora):
    _, saved = run_with_adapters(tmp_path, backend, lora)
    other = "fsdp" if backend == "megatron" else "megatron"
    for name, where, learner in (("whole", other, {}), ("wider", backend, {"lora": {"rank": 8}})):
        config = config_of(tmp_path, name, where, model={"from_run": "sft"}, learner=learner)
        said = "begins with the weights of run sft, its adapters merged into them."
        assert told_beginning(config) == f"Run {name!r} {said}"
        refuse_model(config)
        found, bound = weights(begun(config)[0]), 0 if lora is LORA else 1e-7
        assert all((found[key] - saved[key]).abs().max() <= bound for key in saved)
    asked = {"from_run": "sft", "from_optimizer": True}
    with pytest.raises(ConfigError, match=r"model.from_optimizer=true: the adapters of .* would be merged"):
        refuse_model(config_of(tmp_path, "on", backend, model=asked))


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_on_pairs_has_the_adapters_it_begins_with_for_its_reference_and_a_reward_model_merges_them(
    tmp_path, backend
):
    _, saved = run_with_adapters(tmp_path, backend, LORA)
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    pairs = {"demonstrations": file, "steps": 3, "batch_size": 1, "loss": {"type": "dpo"}}
    optimizer = {"lr": 1e-2, "warmup_steps": 0}
    config = config_of(
        tmp_path, "dpo", backend, model={"from_run": "sft"}, learner={"lora": LORA},
        warmup={**pairs, "optimizer": optimizer},
    )  # fmt: skip
    settings, _ = learner_settings(config, RunDirectory(tmp_path, "dpo"))
    initial, progress = prepare(settings, file), Progress()
    trained = restore_backend(settings, initial, None, progress, UNDIVIDED)
    first, second = (warm_up_step(trained, settings, initial.demonstrations, step) for step in range(2))
    assert first.loss == pytest.approx(log(2), abs=1e-6)
    assert second.pairs["rewards/margins"] != 0
    save_checkpoint(trained, settings.checkpoints, 0, {}, keep=1)
    resumed = restore_backend(
        settings, initial, checkpoints.latest(settings.checkpoints), progress, UNDIVIDED
    )
    with resumed.frozen.in_place("reference"):
        assert differing(weights(resumed), saved) == []
    third = [warm_up_step(one, settings, initial.demonstrations, 2) for one in (trained, resumed)]
    assert third[0] == third[1]
    scores = {**pairs, "loss": {"type": "reward_model"}}
    learner = {"lora": LORA, "steps": 0}
    config = config_of(tmp_path, "rm", backend, model={"from_run": "sft"}, learner=learner, warmup=scores)
    assert told_beginning(config).endswith("of run sft, its adapters merged into them.")
    refuse_model(config)
    settings, _ = learner_settings(config, RunDirectory(tmp_path, "rm"))
    scored = restore_backend(settings, prepare(settings, file), None, Progress(), UNDIVIDED)
    body = {name: weight for name, weight in saved.items() if name != "lm_head.weight"}
    assert differing(weights(scored), body) == []


@pytest.mark.parametrize("lora", [{}, {"lora": LORA}], ids=["whole", "adapters"])
def test_a_reward_model_is_refused_as_a_policy_before_a_start(tmp_path, lora):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    pairs = {"demonstrations": file, "steps": 1, "batch_size": 1, "loss": {"type": "reward_model"}}
    config = config_of(tmp_path, "rm", "megatron", learner={"steps": 0, **lora}, warmup=pairs)
    run = RunDirectory(tmp_path, "rm")
    run.config.write_text(config.model_dump_json())
    settings, _ = learner_settings(config, run)
    initial = prepare(settings, file)
    trained = restore_backend(settings, initial, None, Progress(), UNDIVIDED)
    warm_up_step(trained, settings, initial.demonstrations, 0)
    save_checkpoint(trained, run.checkpoints, 0, asdict(Progress(stage="done", warmup_step=1)), keep=1)
    with pytest.raises(
        ConfigError, match=r"step_00000000 is a reward model, .*\.reward-model\.path .*/rm/export"
    ):
        refuse_model(config_of(tmp_path, "rl", "megatron", model={"from_run": "rm"}))
    for name, others in (("on", lora), ("whole", {})):
        further = config_of(
            tmp_path, name, "megatron", model={"from_run": "rm"}, learner={"steps": 0, **others}, warmup=pairs
        )
        refuse_model(further)
        settings, _ = learner_settings(further, RunDirectory(tmp_path, name))
        going_on = restore_backend(settings, prepare(settings, file), None, Progress(), UNDIVIDED)
        assert differing(weights(going_on), weights(trained)) == []
    save_hf_directory(run.export, trained.hf_config, trained.export(), settings.model_directory)
    with pytest.raises(ConfigError, match=r"rm/export is a reward model, whose output is a score"):
        refuse_model(config_of(tmp_path, "rl", "megatron", model={"path": tmp_path / "rm/export"}))


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
