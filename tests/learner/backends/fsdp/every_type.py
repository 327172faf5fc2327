"""Which types of transformers' causal language models the FSDP backend trains: one step of each.

`python -m tests.learner.backends.fsdp.every_type` tries all of them and writes docs/fsdp_types.md.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bus.errors import ConfigError
from learner.backends.factory import close_world, init_world
from learner.backends.fsdp.build import UNBUILDABLE, empty_model
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, VOCAB, hf_state, random_samples

PAGE = Path(__file__).parents[4] / "docs" / "fsdp_types.md"
MARK = "<!-- written -->\n\n"
"""What follows this in the page is written."""
LARGEST_LOSS, LARGEST_NORM = 3e-7, 1e-6
"""Differences from transformers: absolute of the loss in nats, relative of the gradient's norm."""
LENGTHS = [5, 17, 2, 32, 9, 20]
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96, "d_model": 64, "d_ff": 96,
    "ffn_dim": 96, "num_layers": 2, "num_heads": 4, "word_embed_proj_dim": 64, "embedding_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_topk": 2,
    "num_shared_experts": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "pad_token_id": None, "rotary_dim": 8,
    "num_mtp_layers": 0, "sliding_window": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "activation_dropout": 0.0,
    "layerdrop": 0.0, "block_multiple_of": 16, **LATENT,
}  # fmt: skip
"""Hyperparameters of a tiny model, each where a type has it."""
EACH_HEAD_HAS_KEYS = {"num_key_value_heads": 4, "head_dim": 8}
HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
HALF_CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2},
    "gemma2": {"final_logit_softcapping": 0.7},
    "gemma4_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 4.0},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "lfm2": HALF_CONVOLUTION,
    "lfm2_moe": HALF_CONVOLUTION,
    "olmo_hybrid": HALF_LINEAR | {"pad_token_id": 0},
    "qwen3_5_moe_text": HALF_LINEAR,
    "qwen3_5_text": HALF_LINEAR,
    "qwen3_next": HALF_LINEAR,
}
"""What a type needs besides, to be tiny or to be built at all."""
HEAVY = ("blt",)
"""Types whose smallest model takes minutes."""


@dataclass(frozen=True)
class Outcome:
    """What became of a type."""

    kind: str
    """Name of the type."""
    verdict: Literal["trains", "differs", "refused", "untried"]
    says: str
    """The differences, or why it does not train, in a line."""


def text_types() -> list[str]:
    """Return the types of text alone; the others' text models have types of their own."""
    return [
        kind for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        if kind not in HEAVY and not CONFIG_MAPPING[kind].sub_configs
    ]  # fmt: skip


def tiny_of(kind: str) -> PretrainedConfig:
    """Return a tiny configuration of a type."""
    config_class = CONFIG_MAPPING[kind]
    known = config_class().to_dict() | getattr(config_class, "attribute_map", {})
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        sizes |= {name: value for name, value in EACH_HEAD_HAS_KEYS.items() if name in known}
    return config_class(**{**sizes, **OWN.get(kind, {})})


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a random model of transformers itself, whose norms and biases are not trivial."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tried(kind: str) -> Outcome:
    """Train a step of a tiny random model and compare it with transformers; raises what is no refusal."""
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0)
    try:
        config = tiny_of(kind)
    except UNBUILDABLE:
        config = CONFIG_MAPPING[kind]()  # most are refused whatever their size is
    try:
        empty_model(config, torch.device("meta"))
    except ConfigError as error:
        return Outcome(kind, "refused", _line(error))
    try:
        reference = random_model(config)
    except UNBUILDABLE as error:
        return Outcome(kind, "untried", f"no tiny model: {_line(error)}")
    try:
        trainer = FsdpTrainer(reference.config, hf_state(reference), optimizer)
    except ConfigError as error:
        return Outcome(kind, "refused", _line(error))
    samples = random_samples(LENGTHS, temperatures=(0.5, 0.8, 2.0))
    plain = reference_optimizer(reference, optimizer)
    loss, norm = reference_step(reference, plain, samples, loss="tis", lr=1e-3)
    found = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
    differences = abs(found.loss - loss), abs(found.grad_norm / norm - 1)
    equal = differences[0] <= LARGEST_LOSS and differences[1] <= LARGEST_NORM
    return Outcome(kind, "trains" if equal else "differs", "{:.0e}, {:.0e}".format(*differences))


def _line(error: Exception) -> str:
    """Return the last line of a refusal, or the first of another error, without what a table cannot hold."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = lines[-1] if isinstance(error, ConfigError) else f"{type(error).__name__}: {lines[0]}"
    said = re.sub(r"[|<>`]", "", said.removeprefix("- "))
    return said if len(said) <= 105 else said[:102] + "..."


def listed() -> dict[str, str]:
    """Return the verdicts that the page has, by type."""
    items = re.findall(r"^- (\w+)((?:.|\n  )*)", PAGE.read_text(), re.MULTILINE)
    return {kind: verdict for verdict, item in items for kind in re.findall("`([^`]+)`", item)}


def _write(outcomes: list[Outcome]) -> None:
    before, _ = PAGE.read_text().split(MARK)
    groups: dict[str, list[str]] = {}
    for each in sorted(outcomes, key=lambda each: (each.verdict != "trains", each.kind)):
        groups.setdefault(each.verdict, []).append(f"`{each.kind}`")
    items = [f"- {title}: {', '.join(kinds)}" for title, kinds in groups.items()]
    lines = [fill(i, 110, subsequent_indent="  ", break_on_hyphens=False) for i in items]
    PAGE.write_text(before + MARK + "\n".join(lines) + "\n")


if __name__ == "__main__":
    init_world(backend="fsdp")
    found = []
    for name in text_types():
        found.append(tried(name))
        print(found[-1], flush=True)  # noqa: T201 - a program of its own
    _write(found)
    close_world()
