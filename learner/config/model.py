"""Settings of the policy that training starts from. Loads without torch."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bus.config import Config


class ScratchVision(Config):
    """The vision tower of a scratch model, which makes it a Qwen3-VL."""

    layers: int = Field(0, ge=0)
    """Transformer blocks; 0 makes a model that reads nothing but text. The first one's output is also added
    to the first layer of the language model."""
    hidden_size: int = Field(64, gt=0)
    """Width of the residual stream."""
    heads: int = Field(2, gt=0)
    """Attention heads."""
    intermediate_size: int = Field(128, gt=0)
    """Width of the MLP."""
    patch_size: int = Field(4, gt=0)
    """Width of a patch in pixels; four patches are one token."""
    largest_pixels: int = Field(1024, gt=0)
    """Pixels to which larger images are reduced."""


class ScratchModel(Config):
    """A small random Qwen3 with one token per character, for runs without a model of their own."""

    hidden_size: int = Field(128, gt=0)
    """Width of the residual stream."""
    layers: int = Field(2, gt=0)
    """Transformer blocks."""
    heads: int = Field(4, gt=0)
    """Query heads; the head dimension is `hidden_size / heads`."""
    kv_heads: int = Field(2, gt=0)
    """Key and value heads."""
    intermediate_size: int = Field(256, gt=0)
    """Width of the gated MLP."""
    context: int = Field(128, gt=0)
    """Longest sequence, prompt and response together."""
    vision: ScratchVision = ScratchVision()
    """Sizes of its vision tower, if it is to have one."""


class ModelConfig(Config):
    """The policy that training starts from."""

    path: Path | None = None
    """Hugging Face model directory, or a name on the hub such as Qwen/Qwen3-0.6B, with @REVISION if wanted.
    Without it a small random model is made."""
    from_run: str | None = None
    """Run in the same directory of runs with whose checkpoint training begins, as RUN or RUN@STEP; without a
    step, with its newest. Adapters go on where `learner.lora` and backend are those of that run; else, and
    where a reward model is made of a policy, they are merged into the weights. The tokenizer is that of
    `path`, which must name a model of the same sizes. Other settings of the model are those of that run where
    none are given."""
    from_optimizer: bool = False
    """Also begin with the optimizer's state in that checkpoint, and its place in the schedule of the learning
    rate. Backend, kind of optimizer, adapters and frozen weights must be those of that run."""
    scratch: ScratchModel = ScratchModel()
    """Sizes of the scratch model."""
    other_parts: Literal["left_out", "frozen"] = "left_out"
    """What becomes of the vision tower and the like of a multimodal model of which the text model is trained
    alone. With `left_out` engines serve the text model, and it is exported. With `frozen` they are given the
    whole model, under the names of its own files, in which all but the text model stays as it came: for
    servers that were started with that model, and to export it whole (docs/models.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the learner's parameters and activations; the optimizer's main weights are float32. `auto` is
    what `model.numerics` needs, else bfloat16 on a GPU and float32 on a CPU, which is slow in bfloat16."""
    numerics: Literal["fast", "exact", "sglang"] = "fast"
    """Arithmetic of learner and engines. With `exact` both compute the log-prob of a token to the same bit,
    whatever else is in the batch, at two to three times the cost. It takes a dense model in float32 and the
    embedded engine. With `sglang` the learner computes by SGLang's kernels, and servers run in the mode for
    that: it takes a dense Qwen3 in bfloat16, GPUs and the FSDP backend (docs/exact.md)."""
    freeze: tuple[str, ...] = ()
    """Regular expressions, searched in Hugging Face names: these weights stay as they are."""
    train_only: tuple[str, ...] = ()
    """Regular expressions, searched in Hugging Face names: all other weights stay as they are."""

    @field_validator("from_run")
    @classmethod
    def _names_a_run(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}(@\d{1,12})?", name):
            raise ValueError("it is RUN or RUN@STEP, a run's name and the step of one of its checkpoints")
        return name

    @model_validator(mode="after")
    def _has_an_optimizer_to_begin_with(self) -> Self:
        if self.from_optimizer and self.from_run is None:
            raise ValueError("from_optimizer=true needs from_run: name the run whose optimizer goes on")
        return self
