"""The head for the token after the next, in plain torch around transformers' own layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import hf_state, tiny_model

LAYER = "model.layers.2."
"""Begins the names of the head of a model of two layers, as many as tiny models have."""
BEHIND_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Families whose files have the head as a layer behind those of the model."""
APART_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose files have it apart."""
FAMILIES = (*BEHIND_FAMILIES, *APART_FAMILIES)
BEHIND = {
    "embedding_norm": "model.layers.{}.enorm.weight",
    "hidden_norm": "model.layers.{}.hnorm.weight",
    "projection": "model.layers.{}.eh_proj.weight",
    "norm": "model.layers.{}.shared_head.norm.weight",
}
"""Names in files of what a head has beside its layer, by the number of the model's layers."""
APART = {
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "projection": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
}
"""Those of Qwen's, whose norms multiply by 1 plus their weights."""


def by_day(*families: str) -> list[object]:
    """All families as parameters of a test, those but these in the slow suite."""
    return [pytest.param(family, marks=() if family in families else pytest.mark.slow) for family in FAMILIES]


class ReferenceHead:
    """A tiny model, and the last layer of one with a layer more as the layer of its head."""

    def __init__(
        self, family: str, optimizer: OptimizerConfig, *, weight: float = 1.0, **changes: object
    ) -> None:
        is_apart = family in APART_FAMILIES
        self.model = tiny_model(family, **({} if is_apart else {"num_mtp_layers": 1}), **changes)
        layers = self.model.config.num_hidden_layers
        self.layer = "mtp.layers.0." if is_apart else f"model.layers.{layers}."
        """Begins the names of the head's layer."""
        self._of_donor = f"model.layers.{layers}."
        kinds = {}
        if is_apart:
            kinds = {"layer_types": [*self.model.config.layer_types, "full_attention"]}
        self._donor = tiny_model(family, seed=1, **{**changes, **kinds, "num_hidden_layers": layers + 1})
        own = APART if is_apart else BEHIND
        self._own = {name: own[name].format(layers) for name in own}
        eps = self.model.config.rms_norm_eps
        self._head = _Head(self._donor.model.layers[layers], eps, centred=is_apart)
        self._config, self._weight = optimizer, weight
        self._of_policy = reference_optimizer(self.model, optimizer)
        self._optimizer = reference_optimizer(self._head, optimizer)

    def head(self) -> dict[str, Tensor]:
        """Return the head's weights by the names that they have in files."""
        own = {name: getattr(self._head, attribute).detach() for attribute, name in self._own.items()}
        return self._by_name(self._donor.state_dict(), own)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the latest step likewise, clipped."""
        of_layer = {self._of_donor + name: p.grad for name, p in self._head.layer.named_parameters()}
        own = {name: getattr(self._head, attribute).grad for attribute, name in self._own.items()}
        return self._by_name(of_layer, own)

    def state(self) -> dict[str, Tensor]:
        """Return all weights by the names that they have in files."""
        state = hf_state(self.model)
        if self.model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        return {**state, **self.head()}

    def step(self, samples: list[Sample]) -> tuple[float, float, float]:
        """Update the head, then the policy; return the head's loss, share of correct tokens and norm."""
        self._optimizer.zero_grad()
        found = [self._of_sequence(sample) for sample in samples]
        losses, correct = (torch.cat(values) for values in zip(*found, strict=True))
        (self._weight * losses.mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._head.parameters(), self._config.clip_grad)
        self._optimizer.step()
        reference_step(self.model, self._of_policy, samples, loss="tis", lr=self._config.lr)
        return losses.mean().item(), correct.float().mean().item(), norm.item()

    def _of_sequence(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the losses of the tokens that count, and which of them the head takes for the likeliest."""
        tokens = torch.from_numpy(sample.token_ids).long()
        if len(tokens) < 3:
            return torch.empty(0), torch.empty(0, dtype=torch.bool)
        positions = torch.arange(len(tokens) - 1)[None]
        with torch.no_grad():
            hidden = self.model.model(tokens[None]).last_hidden_state[0, :-1]
            following = self.model.model.embed_tokens(tokens[1:])
            rotary = self.model.model.rotary_emb(hidden[None], positions)
        logits = self._head(hidden, following, positions, rotary) @ self.model.lm_head.weight.detach().t()
        trained = torch.from_numpy(sample.loss_mask)
        counted = trained[1:-1] & trained[2:]
        logits, labels = logits[:-1][counted], tokens[2:][counted]
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels

    def _by_name(self, of_layer: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
        found = revert_weight_conversion(self._donor, of_layer)
        named = {
            self.layer + name.removeprefix(self._of_donor): tensor
            for name, tensor in found.items()
            if name.startswith(self._of_donor)
        }
        return {**named, **own}


class _Head(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, eps: float, *, centred: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for name in ("embedding_norm", "hidden_norm", "norm"):
            values = float(not centred) + 0.1 * torch.randn(64, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(values))
        self.projection = torch.nn.Parameter(0.2 * torch.randn(64, 128, generator=generator))
        self.layer, self._eps, self._centred = layer, eps, centred

    def forward(
        self, hidden: Tensor, following: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        of_next, of_this = (
            self._normed(following, self.embedding_norm),
            self._normed(hidden, self.hidden_norm),
        )
        unseen = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None, None]
        found = self.layer(
            (torch.cat((of_next, of_this), -1) @ self.projection.t())[None],
            attention_mask=unseen, position_ids=positions, position_embeddings=rotary,
        )  # fmt: skip
        return self._normed(found[0], self.norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        factors = 1 + weight if self._centred else weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * factors
