"""A second backend: transformers and AdamW on the CPU, written from the formulas, whole logits and all."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from learner.backends.contract.backend import Exported, StepResult
from learner.backends.contract.frozen_policies import FrozenPolicies
from learner.config.loss import SFTLoss
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import MicroBatch
from learner.host_memory.copies import StateCopies, StateReaders
from learner.model_directories.checkpoint_manifest import file_digest
from tests.learner.reference import reference_optimizer

TRUNCATION_CAP = 2.0


class TorchBackend:
    """Trains demonstrations, and the default objective: REINFORCE with a truncated importance ratio."""

    def __init__(
        self, hf_config: PretrainedConfig, state: Mapping[str, Tensor], optimizer: OptimizerConfig, *,
        dtype: torch.dtype, **_: object,
    ) -> None:  # fmt: skip
        self.hf_config = hf_config
        self.model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).eval()
        self._readers = StateReaders()
        self.model.get_input_embeddings().padding_idx = None  # drawn rollouts hold it: it has a gradient too
        self._load(hf_config, state)
        self.critic, self.adapters = None, None
        self.frozen = FrozenPolicies(self._live, load=self._load)
        self.set_optimizer(optimizer)

    def _live(self) -> list[dict[str, Tensor]]:
        self._readers.settle()
        return [dict(self.model.named_parameters())]

    def _load(self, _: PretrainedConfig, state: Mapping[str, Tensor]) -> None:
        _, unexpected = self.model.load_state_dict(dict(state.items()), strict=False)
        assert not unexpected

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def set_optimizer(self, config: OptimizerConfig) -> None:
        self.optimizer_config, self.updates_done = config, 0
        self.optimizer = reference_optimizer(self.model, config)

    def lent_weights(self):
        self._readers.settle()
        return nullcontext({name: each.data for name, each in self.model.named_parameters()})

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs of the labels and entropies, [T] each, computed for each sequence by itself."""
        logits = [self.model(tokens[None]).logits[0] for tokens in torch.split(batch.tokens, batch.lengths)]
        temperatures = batch.streams.get("temperatures", torch.ones(len(batch.tokens)))
        distribution = torch.log_softmax(torch.cat(logits).float() / temperatures[:, None], dim=-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, batch.labels[:, None])[:, 0], entropy

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [
            torch.where(batch.loss_mask, torch.stack(self._logprobs(batch)), torch.nan)
            for batch in micro_batches
        ]

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: Any, *, policy_version: int
    ) -> StepResult:
        config = self.optimizer_config
        lr = config.lr * min(1.0, (self.updates_done + 1) / max(1, config.warmup_steps))
        computed = sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        left_out = sum(batch.left_out_tokens for batch in micro_batches)
        denominator = sum(batch.denominator for batch in micro_batches)
        self.optimizer.zero_grad()
        total, entropies = 0.0, 0.0
        for batch in micro_batches:
            mask = batch.loss_mask
            logprobs, entropy = (values[mask] for values in self._logprobs(batch))
            weights = torch.ones(())
            if not isinstance(getattr(loss, "loss", loss), SFTLoss):
                ratio = torch.exp(logprobs.detach() - batch.of_trained("behaviour_logprobs"))
                weights = ratio.clamp(max=TRUNCATION_CAP) * batch.of_trained("advantages")
            mean = -(weights * logprobs).sum() / denominator
            mean.backward()
            total, entropies = total + mean.item(), entropies + entropy.sum().item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad).item()
        assert math.isfinite(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._readers.settle()
        self.optimizer.step()
        self.updates_done += 1
        diagnostics = {"entropy_nats": entropies / computed} if computed else {}
        return StepResult(
            loss=total,
            grad_norm=norm,
            lr=lr,
            tokens=computed + left_out,
            computed_tokens=sum(len(batch.tokens) for batch in micro_batches),
            left_out_tokens=left_out,
            denominator=denominator,
            skipped=False,
            diagnostics=diagnostics,
        )

    def release_memory(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _weights(self) -> dict[str, Tensor]:
        tied = {"lm_head.weight"} if self.hf_config.tie_word_embeddings else set()
        return {name: t for name, t in self.model.state_dict().items() if name not in tied}

    def export(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._weights().items()}

    def streamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.export().items())

    def exported(self) -> Exported:
        weights = self._weights()
        return Exported({name: tuple(t.shape) for name, t in weights.items()}, weights, _nothing)

    def before_change(self, let_change: Callable[[], None]) -> None:
        self._readers.published.append(let_change)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights().values())

    def fingerprint(self) -> dict[str, Any]:
        return {"hidden_size": self.hf_config.hidden_size, "layers": self.hf_config.num_hidden_layers}

    def other_hyperparameters(self, hf_config: PretrainedConfig) -> list[str]:
        return [] if hf_config.to_dict() == self.hf_config.to_dict() else ["the configuration"]

    def training_state(self) -> dict[str, Any]:
        return {"updates_done": self.updates_done}

    def prepare_checkpoints(self) -> None:
        pass

    def stage_checkpoint(self, directory: Path) -> "Staged":
        state = {
            "model": self.export(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, directory / "copied.pt")  # the optimizer's state is not copied by `state_dict`
        return Staged(directory / "copied.pt", directory / "state.pt")

    def refuse_other_training(self, directory: Path, training: Mapping[str, Any]) -> None:
        assert training["updates_done"] >= 0

    def load_checkpoint(self, directory: Path, training: Mapping[str, Any]) -> None:
        state = torch.load(directory / "state.pt")
        self._load(self.hf_config, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.updates_done = training["updates_done"]


@dataclass
class Staged:
    copied: Path
    file: Path
    copies = StateCopies((), (), None)

    def write(self) -> dict[str, str]:
        self.copied.rename(self.file)
        return {self.file.name: file_digest(self.file)}

    def finalize(self) -> None:
        pass


def _nothing() -> Iterator[tuple[str, Tensor]]:
    return iter(())
