import pytest
import torch

from bus.errors import ConfigError
from learner.backends.megatron.trainer import Trainer
from learner.backends.megatron.weights.frozen_weights import frozen_weights
from learner.backends.shared.trainable import TrainableWeights
from learner.config.loss import SFTLoss
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.tiny import hf_state, random_samples, tiny_config, tiny_model


def changed(trainable, family="qwen3", *, steps=2):
    """Names of the weights that training changed."""
    model = tiny_model(family)
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2), trainable=trainable)
    before = trainer.export()
    for _ in range(steps):
        trainer.train_step(pack(random_samples([40, 9]), 100), SFTLoss(), policy_version=0)
    return {name for name, tensor in trainer.export().items() if not torch.equal(tensor, before[name])}


def test_only_what_is_named_is_trained():
    found = changed(TrainableWeights(train_only=(r"layers\.1\.mlp",)))
    assert found == {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}


def test_what_is_frozen_stays_and_all_else_is_trained():
    found = changed(TrainableWeights(freeze=("embed_tokens", "lm_head", r"layers\.0\.")))
    assert found == {name for name in hf_state(tiny_model()) if ".layers.1." in name} | {"model.norm.weight"}


def test_freezing_goes_over_train_only():
    found = changed(TrainableWeights(freeze=("mlp",), train_only=(r"layers\.1\.", "lm_head")))
    assert found == {
        name for name in hf_state(tiny_model()) if ".layers.1." in name and "mlp" not in name
    } | {"lm_head.weight"}


def test_the_router_of_a_mixture_can_be_frozen():
    found = changed(TrainableWeights(freeze=(r"mlp\.gate\.weight$",)), "qwen3_moe")
    assert "model.layers.0.mlp.gate.weight" not in found
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in found


def test_the_trained_weights_move_as_torch_moves_them():
    reference = tiny_model()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad = "self_attn" in name
    trainer = Trainer(
        reference.config,
        hf_state(reference),
        OptimizerConfig(lr=1e-3),
        trainable=TrainableWeights(train_only=("self_attn",)),
    )
    optimizer = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    for step in range(3):
        [sample] = random_samples([30], seed=step)
        ids = torch.from_numpy(sample.token_ids).long()
        logprobs = torch.log_softmax(reference(ids[None]).logits[0, :-1], dim=-1)
        loss = -logprobs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(sample.loss_mask[1:])].mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        result = trainer.train_step(pack([sample], 100), SFTLoss(), policy_version=0)
        assert (result.loss, result.grad_norm) == pytest.approx((loss.item(), norm.item()), abs=2e-5)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (
            TrainableWeights(freeze=("mlp", "router")),
            "model.freeze: 'router' matches no weight; there are .*norm",
        ),
        (TrainableWeights(train_only=("lora",)), "model.train_only: 'lora' matches no weight"),
        (TrainableWeights(freeze=("(",)), r"model.freeze: '\(' is no regular expression"),
        (TrainableWeights(freeze=(".",)), "nothing is left to train"),
        (TrainableWeights(freeze=("mlp",), train_only=("mlp",)), "nothing is left to train"),
        (TrainableWeights(freeze=("q_proj",)), r"k_proj\.weight, .*v_proj.* trained and .*q_proj.weight not"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(trainable, message):
    with pytest.raises(ConfigError, match=message):
        frozen_weights(tiny_config(), trainable)
