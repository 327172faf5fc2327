"""Preference losses on pairs of a file, against the papers' formulas on the model of transformers."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from actors.rewards.builtin.registry import load_reward
from actors.settings.rewards import RewardConfig
from bus.errors import ConfigError
from launch.plan.memory import held_policies, learner_rank
from launch.plan.plan import model_of
from launch.settings.run_config import validate
from learner.backends.contract.backend import Backend
from learner.checkpoint.commit import save_checkpoint
from learner.config.batch import BatchConfig
from learner.config.loss import DPOLoss, RewardModelLoss, SFTLoss
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from learner.initial.initial import Initial, prepare
from learner.model_directories.model_directory import load_tokenizer
from learner.progress.progress import Progress
from learner.publication.adapter_directory import write_adapter
from learner.run.restore import restore_backend
from learner.step.warmup import heldout_figures, warm_up_step
from storage.chats.stop_tokens import answer_end
from storage.disk.checkpoints import latest
from tests.actors.rewards.answers import answer
from tests.learner.division import divide_world
from tests.learner.lora_reference import adapt
from tests.learner.run.stage_settings import settings_of

PAIRS = [(f"{n}+{n}=", str(2 * n), str(3 * n + 1)) for n in range(1, 9)]
OPTIMIZER = {"lr": 3e-3, "warmup_steps": 0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip_grad": 1.0}
BATCH = BatchConfig(tokens_per_micro_batch=40, logprob_tokens_per_micro_batch=60)
BETA = 0.3


def settings_of_pairs(directory: Path, loss: DPOLoss, **learner: object) -> LearnerSettings:
    rows = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in PAIRS]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warmup = WarmupConfig.model_validate({
        "steps": 9, "batch_size": 4, "loss": loss, "optimizer": OPTIMIZER,
        "demonstrations": directory / "pairs.jsonl", "heldout": directory / "pairs.jsonl",
    })  # fmt: skip
    settings = settings_of(directory, batch=BATCH, **learner)
    scratch = settings.model.scratch.model_copy(update={"layers": 2})  # one for each stage of a pipeline
    return replace(settings, warmup=warmup, model=settings.model.model_copy(update={"scratch": scratch}))


def begun(settings: LearnerSettings, checkpoint: Path | None = None) -> tuple[Initial, Backend]:
    initial = prepare(settings, settings.warmup.demonstrations)
    backend = restore_backend(settings, initial, checkpoint, Progress(), settings.learner.parallel)
    return initial, backend


def log_ratios(model: PreTrainedModel, reference: PreTrainedModel, sample) -> tuple[Tensor, int]:
    """Return the sum of the log ratios of an answer's tokens, and their number."""
    ids = torch.from_numpy(sample.token_ids).long()[None]
    of_each = [
        one(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]) for one in (model, reference)
    ]
    trained = torch.from_numpy(sample.loss_mask)[1:]
    return (of_each[0] - of_each[1].detach())[trained].double().sum(), int(trained.sum())


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


FORMULAS = {  # of the log ratios of both answers, and of their lengths
    "sigmoid": lambda better, worse, _, __: -torch.log(sigmoid(BETA * better - BETA * worse)),
    "smooth": lambda better, worse, _, __: (
        -0.9 * torch.log(sigmoid(BETA * (better - worse))) - 0.1 * torch.log(sigmoid(BETA * (worse - better)))
    ),
    "hinge": lambda better, worse, _, __: torch.relu(1 - BETA * (better - worse)),
    "ipo": lambda better, worse, n, m: (better / n - worse / m - 1 / (2 * BETA)) ** 2,
}


def means(model: PreTrainedModel, reference: PreTrainedModel, samples, formula: str) -> dict[str, Tensor]:
    """Return the means over pairs by the papers' formulas."""
    ratios, lengths = zip(*[log_ratios(model, reference, sample) for sample in samples], strict=True)
    better, worse = torch.stack(ratios).view(-1, 2).unbind(1)
    found = {
        "loss": FORMULAS[formula](better, worse, *torch.tensor(lengths).view(-1, 2).unbind(1)),
        "rewards/chosen": BETA * better,
        "rewards/rejected": BETA * worse,
        "rewards/margins": BETA * (better - worse),
        "rewards/accuracies": (better > worse).double(),
    }
    return {name: values.mean() for name, values in found.items()}


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("formula", "backend"),
    [("sigmoid", "megatron"), ("ipo", "fsdp"), ("hinge", "megatron"), ("smooth", "fsdp")],
)
def test_steps_and_held_out_figures_are_those_of_the_formula_and_a_resume_changes_no_bit(
    tmp_path: Path, formula: str, backend: str
):
    smooth = formula == "smooth"
    loss = DPOLoss(beta=BETA, form="sigmoid" if smooth else formula, label_smoothing=0.1 if smooth else 0.0)
    settings = settings_of_pairs(tmp_path, loss, backend=backend)
    initial, trained = begun(settings)
    plain, reference = (AutoModelForCausalLM.from_pretrained(tmp_path / "model") for _ in range(2))
    adam = torch.optim.AdamW(plain.parameters(), lr=OPTIMIZER["lr"], betas=(0.9, 0.95), weight_decay=0)
    for step in range(3):
        if step == 2:
            save_checkpoint(trained, settings.checkpoints, 2, {}, keep=1)
        result = warm_up_step(trained, settings, initial.demonstrations, step)
        expected = means(plain, reference, initial.demonstrations.step(step, 4), formula)
        adam.zero_grad()
        expected["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        assert {"loss": result.loss, **result.pairs} == pytest.approx(as_floats(expected), abs=2e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-3)
    held = heldout_figures(trained, settings.warmup, BATCH, initial.heldout_demonstrations)
    every = initial.demonstrations.all(share=0, shares=1)
    expected = means(plain, reference, every, formula)
    expected["loss_nats"] = expected.pop("loss")
    assert held == pytest.approx(as_floats(expected), abs=5e-5)
    assert held["rewards/margins"] != 0
    _, resumed = begun(settings, latest(settings.checkpoints))
    assert warm_up_step(resumed, settings, initial.demonstrations, 2) == result


def as_floats(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items()}


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_memory_that_a_reference_takes_is_counted(tmp_path: Path, backend: str, rank: int):
    settings = settings_of_pairs(tmp_path, DPOLoss(), backend=backend, lora={"rank": rank})
    initial, trained = begun(settings)
    warm_up_step(trained, settings, initial.demonstrations, 0)
    both = [*trained.frozen.weights("reference"), *trained.frozen._current]
    taken = sum(tensor.nbytes for chunk in both for tensor in chunk.values())
    config = validate({"model": {"dtype": "float32"}, "learner": settings.learner.model_dump()})
    model = model_of(config, initial.hf_config, on_gpu=False)
    memory = learner_rank(model, settings.learner, 1, 1)
    assert held_policies(model, settings.learner, settings.warmup, memory, 1) == taken
    without = settings.warmup.model_copy(update={"loss": SFTLoss()})
    assert held_policies(model, settings.learner, without, memory, 1) == 0


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_adapters_are_compared_with_the_model_without_them(tmp_path: Path, backend: str):
    settings = settings_of_pairs(tmp_path, DPOLoss(beta=BETA), backend=backend, lora={"rank": 4})
    initial, trained = begun(settings)
    first, second = (warm_up_step(trained, settings, initial.demonstrations, step) for step in range(2))
    assert (first.loss, first.pairs["rewards/margins"]) == (pytest.approx(math.log(2)), 0.0)
    assert second.pairs["rewards/margins"] != 0
    held = heldout_figures(trained, settings.warmup, BATCH, initial.heldout_demonstrations)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain.load_state_dict(trained.export(), strict=False)
    expected = means(plain, reference, initial.demonstrations.all(share=0, shares=1), "sigmoid")
    assert held["loss_nats"] == pytest.approx(expected["loss"].item(), abs=5e-5)


def two_steps(
    directory: Path, loss: DPOLoss | RewardModelLoss, parallel: dict[str, int], backend: str, rank: int
) -> list[tuple[float, ...]]:
    settings = settings_of_pairs(directory, loss, backend=backend, parallel=parallel, lora={"rank": rank})
    divide_world(settings.learner.parallel)
    initial, trained = begun(settings)
    found = []
    for step in range(2):
        result = warm_up_step(trained, settings, initial.demonstrations, step)
        found.append((result.loss, result.grad_norm, *result.pairs.values()))
    held = heldout_figures(trained, settings.warmup, BATCH, initial.heldout_demonstrations)
    return [*found, tuple(held.values())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "parallel", "loss", "rank"),
    [
        ("megatron", {}, DPOLoss(beta=BETA), 0),
        ("megatron", {"context": 2}, DPOLoss(beta=BETA), 0),
        ("megatron", {"tensor": 2}, DPOLoss(beta=BETA), 0),
        ("megatron", {"pipeline": 2}, DPOLoss(beta=BETA), 0),
        ("fsdp", {}, DPOLoss(beta=BETA), 0),
        ("fsdp", {}, RewardModelLoss(), 4),
        ("megatron", {"context": 2}, RewardModelLoss(), 0),
        ("megatron", {"tensor": 2, "sequence": True}, RewardModelLoss(), 4),
        ("megatron", {"pipeline": 2}, RewardModelLoss(), 0),
    ],
    ids=["data", "context", "tensor", "pipeline", "fsdp"]
    + [f"scores by {name}" for name in ("fsdp", "context", "tensor", "pipeline")],
)
def test_two_ranks_train_on_pairs_as_one_does(worlds, tmp_path: Path, backend, parallel, loss, rank):
    alone = two_steps(tmp_path, loss, {}, backend, rank)
    for found in worlds.run(2, two_steps, tmp_path, loss, parallel, backend, rank):
        assert found == [pytest.approx(step, abs=2e-5) for step in alone]


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("backend", "rank", "pads_with_end"),
    [("fsdp", 0, True), ("megatron", 4, False), ("megatron", 0, False), ("fsdp", 4, False)],
)
def test_a_reward_model_is_trained_by_bradley_terry_and_is_read_by_transformers(
    tmp_path: Path, backend: str, rank: int, pads_with_end: bool
):
    settings = settings_of_pairs(tmp_path, RewardModelLoss(), backend=backend, lora={"rank": rank})
    if pads_with_end:  # then the score is that of the token before
        config = prepare(settings, settings.warmup.demonstrations).hf_config
        config.pad_token_id = answer_end(load_tokenizer(tmp_path / "model"))
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(tmp_path / "model")
    initial, trained = begun(settings)
    plain = read_with_adapters(written(trained, tmp_path, "begin")).train()
    of_plain = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(of_plain, lr=OPTIMIZER["lr"], betas=(0.9, 0.95), weight_decay=0)
    for step in range(3):
        if step == 2:
            save_checkpoint(trained, settings.checkpoints, 2, {}, keep=1)
        result = warm_up_step(trained, settings, initial.demonstrations, step)
        chosen, rejected = scores(plain, initial.demonstrations.step(step, 4)).view(-1, 2).unbind(1)
        loss = -torch.log(sigmoid(chosen - rejected)).mean()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(of_plain, 1.0)
        adam.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert result.pairs["rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
        assert result.pairs["rewards/accuracies"] == (chosen > rejected).double().mean()
    held = heldout_figures(trained, settings.warmup, BATCH, initial.heldout_demonstrations)
    end = written(trained, tmp_path, "end")
    exported = AutoModelForSequenceClassification.from_pretrained(end)
    for one in (plain, exported, read_with_adapters(end)):
        chosen, rejected = scores(one, initial.demonstrations.all(share=0, shares=1)).view(-1, 2).unbind(1)
        assert held["rewards/margins"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    _, resumed = begun(settings, latest(settings.checkpoints))
    assert warm_up_step(resumed, settings, initial.demonstrations, 2) == result


def written(backend: Backend, directory: Path, name: str) -> Path:
    path = directory / name
    backend.hf_config.save_pretrained(path)
    load_tokenizer(directory / "model").save_pretrained(path)
    save_file(backend.export(), path / "model.safetensors", metadata={"format": "pt"})
    if (adapters := backend.adapters) is not None:
        alone = {name: tensor.clone() for name, tensor in adapters.streamed()}
        write_adapter(path / "adapter", adapters, alone, str(path))
        save_file({name: adapters.base[name] for name in adapters.base}, path / "base.safetensors")
    return path


def read_with_adapters(path: Path) -> PreTrainedModel:
    """Read what was written, to train it: the whole model, or frozen weights with adapters and a head."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # else the row of the padding token is not trained
    if not (path / "adapter").is_dir():
        return model
    model.load_state_dict(load_file(path / "base.safetensors"), strict=False)
    config = json.loads((path / "adapter/adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tensors = load_file(path / "adapter/adapter_model.safetensors")
    head = tensors.pop("base_model.model.score.weight")
    adapt(model, tensors, config["lora_alpha"] / config["r"])
    model.score.weight = torch.nn.Parameter(head)
    return model


def test_the_reward_of_a_model_is_the_score_that_it_was_trained_to_give(tmp_path: Path):
    settings = settings_of_pairs(tmp_path, RewardModelLoss(), backend="fsdp")
    initial, trained = begun(settings)
    warm_up_step(trained, settings, initial.demonstrations, 0)
    held = heldout_figures(trained, settings.warmup, BATCH, initial.heldout_demonstrations)
    path = written(trained, tmp_path, "end")
    found = given(path, [chosen for _, chosen, _ in PAIRS])
    assert sum(found) / len(PAIRS) == pytest.approx(held["rewards/chosen"], abs=1e-5)
    assert len(set(found)) == len(PAIRS)
    with pytest.raises(ConfigError, match=r"has 2 labels and lacks the weights \['score.weight'\]"):
        given(tmp_path / "model", ["1"])
    with pytest.raises(ConfigError, match=r"reward_model.path=.*nowhere has no config.json"):
        given(tmp_path / "nowhere", ["1"])


def given(path: Path, texts: list[str]) -> list[float]:
    """Return the rewards of answers to the prompts of `PAIRS`."""
    config = RewardConfig.model_validate({"reward": "reward_model", "reward_model": {"path": path}})

    async def rewards() -> list[float]:
        reward = load_reward("reward_model", config)
        answers = [
            answer(text, messages=({"role": "user", "content": prompt},))
            for (prompt, _, _), text in zip(PAIRS, texts, strict=False)
        ]
        try:
            return await asyncio.gather(*map(reward, answers))
        finally:
            await reward.close()

    return asyncio.run(rewards())


def scores(model: PreTrainedModel, samples) -> Tensor:
    """Return the scores of a padded batch, as transformers computes it."""
    rows = [torch.from_numpy(sample.token_ids).long() for sample in samples]
    padded = pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(padded, attention_mask=mask).logits[:, 0].double()
