"""Every layout of ranks trains as transformers with torch's AdamW does on one."""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bus.errors import ConfigError
from learner.backends.contract.backend import StepResult
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.model.model import build_chunks
from learner.backends.megatron.sharding import share_of_rank
from learner.backends.megatron.trainer import Trainer
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from learner.distributed.process_group import gathered
from learner.host_memory.copies import host_tensors
from learner.publication.host_copy import HostCopy
from tests.learner.backends.model.built import export_hf_weights
from tests.learner.division import divide_world
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples, reference_logits, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, eps=1e-4)
"""Optimizer with an eps that keeps rounding errors of gradients near 0 from becoming whole updates."""
STEPS = 2
OVER_CHUNKS = [1, 150, 3, 64, 2, 65, 130, 4, 71]
"""Lengths of sequences through which layers with a state go in pieces of 64 tokens."""


@dataclass(frozen=True)
class Case:
    """A layout, and the model it is tried on."""

    ranks: int
    layout: dict[str, object] = field(default_factory=dict)
    model: tuple[tuple[str, object], ...] = ()
    budget: int = 40
    """Tokens of a micro-batch: the samples of a step make several."""

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**self.layout)


TIED = (("tied", True),)
FOUR_LAYERS = (("num_hidden_layers", 4),)
ODD_VOCABULARY = (("vocab_size", 59),)
LLAMA = (("family", "llama"),)
LLAMA3 = (*LLAMA, ("rope", "llama3"))
YARN = (*LLAMA, ("rope", "yarn"))
WINDOW = (("family", "mistral"), ("sliding_window", 8))
MOE = (("family", "qwen3_moe"),)
SHARED = (("family", "qwen2_moe"), ("num_hidden_layers", 3), ("decoder_sparse_step", 2))
GLM4 = (("family", "glm4"),)
GLM_LITE = (("family", "glm4_moe_lite"), ("num_hidden_layers", 3))
MINIMAX = (("family", "minimax_m2"),)
GLM = (("family", "glm4_moe"), ("num_hidden_layers", 3))
DEEPSEEK = (("family", "deepseek_v3"), ("num_hidden_layers", 4), ("rope", "mscale"))
WHOLE_QUERIES = (*DEEPSEEK, ("q_lora_rank", None))
MIXTRAL = (("family", "mixtral"),)
GPT_OSS = (("family", "gpt_oss"), ("num_hidden_layers", 4))
GEMMA = (("family", "gemma3_text"), ("num_hidden_layers", 4), ("tied", True), ("sliding_window_pattern", 3))
QWEN3_NEXT = (("family", "qwen3_next"), ("num_hidden_layers", 4))
QWEN3_5 = (("family", "qwen3_5_text"), ("num_hidden_layers", 3))
QWEN3_5_MOE = (("family", "qwen3_5_moe_text"),)
FOUR_KEY_HEADS = (("linear_num_key_heads", 4), ("num_hidden_layers", 2))
ONE_HEAD = (("num_key_value_heads", 1),)
PLAIN = {"distributed_optimizer": False}
SP = {"tensor": 2, "sequence": True}
RING = {"context": 2, "context_attention": "ring"}
CASES = {
    "dp2": Case(2),
    "dp2 plain": Case(2, PLAIN),
    "dp2 overlapped": Case(2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "dp2 plain overlapped": Case(2, PLAIN | {"overlap_grad_reduce": True}),
    "tp2": Case(2, {"tensor": 2}),
    "tp2 plain tied": Case(2, PLAIN | {"tensor": 2}, TIED),
    "tp2 qkv bias": Case(2, {"tensor": 2}, (("family", "qwen2"),)),
    "tp2 odd vocabulary": Case(2, {"tensor": 2}, ODD_VOCABULARY),
    "tp2 odd tied vocabulary": Case(2, {"tensor": 2}, ODD_VOCABULARY + TIED),
    "tp2 sp": Case(2, {"tensor": 2, "sequence": True}),
    "tp2 sp yarn": Case(2, {"tensor": 2, "sequence": True}, YARN),
    "tp2 sp window": Case(2, {"tensor": 2, "sequence": True}, WINDOW),
    "tp2 sp plain tied": Case(2, PLAIN | {"tensor": 2, "sequence": True}, TIED),
    "tp2 of one key-value head": Case(2, {"tensor": 2}, ONE_HEAD),
    "tp2 sp of one key-value head, qkv bias": Case(2, SP, (*ONE_HEAD, ("family", "qwen2"))),
    "tp2 sp plain of one key-value head": Case(2, PLAIN | SP, ONE_HEAD + LLAMA),
    "tp2 sp ep2 of one key-value head, glm": Case(2, SP | {"expert": 2}, ONE_HEAD + GLM),
    "tp4 sp of two key-value heads": Case(4, {"tensor": 4, "sequence": True}),
    "tp2 cp2 of one key-value head": Case(4, {"tensor": 2, "context": 2}, ONE_HEAD),
    "pp2": Case(2, {"pipeline": 2}),
    "pp2 plain": Case(2, PLAIN | {"pipeline": 2}),
    "pp2 tied": Case(2, {"pipeline": 2}, TIED),
    "pp2 uneven deepseek": Case(2, {"pipeline": 2}, (("family", "deepseek_v3"), ("num_hidden_layers", 3))),
    "pp2 vpp2": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, FOUR_LAYERS),
    "pp2 vpp2 plain tied": Case(2, PLAIN | {"pipeline": 2, "virtual_pipeline": 2}, FOUR_LAYERS + TIED),
    "cp2": Case(2, {"context": 2}),
    "cp2 one sequence a micro-batch": Case(2, {"context": 2}, budget=1),
    "cp2 llama3": Case(2, {"context": 2}, LLAMA3),
    "cp2 window": Case(2, {"context": 2}, WINDOW),
    "cp2 plain tied": Case(2, PLAIN | {"context": 2}, TIED),
    "cp2 ring": Case(2, RING),
    "cp2 ring window": Case(2, RING | {"recompute": "full"}, WINDOW),
    "cp2 ring deepseek": Case(2, RING | {"recompute": "selective"}, DEEPSEEK),
    "cp4 ring": Case(4, RING | {"context": 4}, LLAMA),
    "pp2 cp2 ring": Case(4, RING | {"pipeline": 2}, TIED),
    "cp2 short whole": Case(2, {"context": 2, "context_min_tokens": 18}),
    "cp2 ring short whole": Case(2, RING | {"context_min_tokens": 18, "recompute": "selective"}, WINDOW),
    "cp2 all whole, ep2": Case(2, {"context": 2, "expert": 2, "context_min_tokens": 100}, MOE),
    "cp2 tp2 sp ring short whole": Case(4, SP | RING | {"context_min_tokens": 18}),
    "cp2 pp2 short whole": Case(4, {"context": 2, "pipeline": 2, "context_min_tokens": 18}, DEEPSEEK),
    "cp4 short whole": Case(4, {"context": 4, "context_min_tokens": 18, "recompute": "full"}, LLAMA),
    "full recompute": Case(2, {"tensor": 2, "sequence": True, "recompute": "full"}),
    "selective recompute": Case(2, {"context": 2, "recompute": "selective"}),
    "ep2": Case(2, {"expert": 2}, MOE),
    "ep2 plain tied mixtral": Case(2, PLAIN | {"expert": 2}, MIXTRAL + TIED),
    "ep2 overlapped": Case(2, {"expert": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}, MOE),
    "dp2 moe": Case(2, {}, MOE),
    "cp2 moe": Case(2, {"context": 2}, MOE),
    "tp2 sp moe": Case(2, {"tensor": 2, "sequence": True}, MOE),
    "tp2 sp shared expert": Case(2, {"tensor": 2, "sequence": True}, SHARED),
    "tp2 sp ep2 glm": Case(2, {"tensor": 2, "sequence": True, "expert": 2}, GLM),
    "tp2 sp of one key-value head, glm4": Case(2, SP, ONE_HEAD + GLM4),
    "pp2 cp2 glm4": Case(4, {"pipeline": 2, "context": 2}, GLM4),
    "tp2 sp ep2 glm lite": Case(2, SP | {"expert": 2}, GLM_LITE),
    "pp2 uneven glm lite": Case(2, {"pipeline": 2}, GLM_LITE),
    "ep2 minimax": Case(2, {"expert": 2}, MINIMAX),
    "pp2 cp2 minimax": Case(4, {"pipeline": 2, "context": 2}, MINIMAX),
    "cp2 glm": Case(2, {"context": 2}, GLM),
    "dp2 deepseek overlapped": Case(2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, DEEPSEEK),
    "tp2 sp deepseek": Case(2, {"tensor": 2, "sequence": True}, DEEPSEEK),
    "tp2 sp ep2 deepseek": Case(2, PLAIN | {"tensor": 2, "sequence": True, "expert": 2}, WHOLE_QUERIES),
    "cp2 deepseek": Case(2, {"context": 2, "recompute": "selective"}, DEEPSEEK),
    "ep2 deepseek": Case(2, {"expert": 2, "recompute": "full"}, DEEPSEEK),
    "pp2 vpp2 deepseek": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, DEEPSEEK),
    "dp2 gemma overlapped": Case(2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, GEMMA),
    "tp2 sp gemma": Case(2, {"tensor": 2, "sequence": True, "recompute": "full"}, GEMMA),
    "cp2 ring short whole gemma": Case(2, RING | {"context_min_tokens": 18}, GEMMA),
    "cp2 short whole gpt-oss": Case(2, {"context": 2, "context_min_tokens": 18}, GPT_OSS),
    "cp2 gemma": Case(2, {"context": 2, "recompute": "selective"}, GEMMA),
    "pp2 vpp2 gemma": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, GEMMA),
    "dp2 gpt-oss overlapped": Case(2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, GPT_OSS),
    "tp2 sp gpt-oss": Case(2, SP | {"recompute": "full"}, GPT_OSS),
    "tp2 sp ep2 gpt-oss": Case(2, SP | {"expert": 2}, (*GPT_OSS, ("num_key_value_heads", 1))),
    "tp2 sp ep2 plain gpt-oss": Case(2, PLAIN | SP | {"expert": 2}, GPT_OSS),
    "ep2 gpt-oss": Case(2, {"expert": 2}, GPT_OSS),
    "cp2 gpt-oss": Case(2, {"context": 2, "recompute": "selective"}, GPT_OSS),
    "pp2 vpp2 gpt-oss": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, GPT_OSS),
    "dp2 qwen3-next overlapped": Case(
        2, {"overlap_grad_reduce": True, "overlap_param_gather": True, "recompute": "selective"}, QWEN3_NEXT
    ),
    "tp2 sp qwen3-next": Case(2, SP | {"recompute": "full"}, QWEN3_NEXT),
    "tp2 sp ep2 qwen3-next": Case(2, SP | {"expert": 2}, QWEN3_NEXT + ONE_HEAD),
    "ep2 qwen3-next": Case(2, {"expert": 2}, QWEN3_NEXT),
    "pp2 vpp2 qwen3-next": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, QWEN3_NEXT),
    "tp2 qwen3.5": Case(2, {"tensor": 2}, QWEN3_5),
    "tp2 sp plain qwen3.5": Case(2, PLAIN | SP | {"recompute": "selective"}, QWEN3_5 + TIED),
    "pp2 uneven qwen3.5": Case(2, {"pipeline": 2}, QWEN3_5),
    "tp2 sp ep2 plain qwen3.5-moe": Case(2, PLAIN | SP | {"expert": 2}, QWEN3_5_MOE),
    "tp2 sp etp2 qwen3.5-moe": Case(2, SP | {"expert_tensor": 2}, QWEN3_5_MOE),
    "cp2 qwen3-next": Case(2, {"context": 2, "recompute": "selective"}, QWEN3_NEXT),
    "cp2 ring short whole qwen3-next": Case(
        2,
        RING | {"context_min_tokens": 18, "overlap_grad_reduce": True, "recompute": "selective"},
        QWEN3_NEXT,
    ),
    "cp2 ring plain qwen3.5": Case(2, PLAIN | RING | {"recompute": "full"}, QWEN3_5 + TIED),
    "tp2 sp cp2 short whole qwen3-next": Case(
        4, SP | {"context": 2, "context_min_tokens": 18}, QWEN3_NEXT + FOUR_KEY_HEADS
    ),
    "tp2 cp2 ring qwen3.5": Case(4, RING | {"tensor": 2}, QWEN3_5 + FOUR_KEY_HEADS),
    "pp2 cp2 ep2 qwen3.5-moe": Case(4, {"pipeline": 2, "context": 2, "expert": 2}, QWEN3_5_MOE),
    "pp2 cp2 short whole qwen3.5": Case(
        4, {"pipeline": 2, "context": 2, "context_min_tokens": 18, "recompute": "full"}, QWEN3_5
    ),
    "cp4 qwen3.5": Case(4, {"context": 4}, QWEN3_5 + FOUR_KEY_HEADS),
    "tp4 sp qwen3-next": Case(4, SP | {"tensor": 4}, QWEN3_NEXT + FOUR_KEY_HEADS),
    "tp2 sp etp2": Case(2, {"tensor": 2, "sequence": True, "expert_tensor": 2}, MOE),
    "tp2 sp ep2": Case(2, {"tensor": 2, "sequence": True, "expert": 2}, MOE),
    "tp2 sp ep2 plain": Case(2, PLAIN | {"tensor": 2, "sequence": True, "expert": 2}, MIXTRAL),
    "dp2 tp2 sp ep2": Case(4, {"tensor": 2, "sequence": True, "expert": 2}, MOE),
    "tp2 sp ep2 etp2": Case(4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}, MOE),
    "pp2 ep2": Case(4, {"pipeline": 2, "expert": 2}, MOE),
    "cp2 ep4 mixtral recomputed": Case(4, {"context": 2, "expert": 4, "recompute": "full"}, MIXTRAL),
    "tp2 pp2": Case(4, {"tensor": 2, "pipeline": 2}),
    "tp2 sp pp2 plain tied": Case(4, PLAIN | {"tensor": 2, "sequence": True, "pipeline": 2}, TIED),
    "tp2 sp pp2 vpp2 tied": Case(
        4, {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2}, FOUR_LAYERS + TIED
    ),
    "tp2 cp2": Case(4, {"tensor": 2, "context": 2}),
    "tp2 sp cp2 plain tied": Case(4, PLAIN | {"tensor": 2, "sequence": True, "context": 2}, TIED),
    "pp2 cp2 tied": Case(4, {"pipeline": 2, "context": 2}, TIED),
    "dp2 tp2 sp overlapped": Case(
        4, {"tensor": 2, "sequence": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "dp2 pp2 vpp2 overlapped": Case(
        4,
        {"pipeline": 2, "virtual_pipeline": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        FOUR_LAYERS,
    ),
    "dp2 pp2 tied overlapped": Case(
        4, {"pipeline": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}, TIED
    ),
    "cp4": Case(4, {"context": 4}, LLAMA),
}
IN_EVERY_RUN = ("tp2 sp",)
"""Layouts that are not marked slow."""
NIGHTLY = (
    "tp2 sp ep2 etp2", "pp2 ep2", "tp2 pp2", "tp2 sp pp2 plain tied", "tp2 cp2", "tp2 sp cp2 plain tied",
    "dp2 tp2 sp overlapped", "dp2 pp2 tied overlapped",
    "tp2 cp2 of one key-value head", "pp2 cp2 ring", "cp4 ring", "dp2 tp2 sp ep2",
    "tp4 sp of two key-value heads", "pp2 cp2 tied", "dp2 pp2 vpp2 overlapped", "cp2 ep4 mixtral recomputed",
    "cp2 pp2 short whole",
    "dp2 plain overlapped", "tp2 plain tied", "tp2 odd tied vocabulary", "tp2 sp plain tied",
    "tp2 sp plain of one key-value head", "pp2 plain", "cp2 plain tied", "cp2 llama3", "tp2 sp yarn",
    "cp2 ring short whole", "cp2 ring window", "ep2 overlapped", "ep2 plain tied mixtral", "cp2 moe",
    "cp2 glm", "pp2 cp2 glm4", "pp2 cp2 minimax", "pp2 uneven glm lite",
    "tp2 sp moe", "cp2 deepseek", "ep2 deepseek",
    "dp2 gemma overlapped", "dp2 gpt-oss overlapped", "cp2 gemma", "ep2 gpt-oss",
    "cp2 short whole gpt-oss", "tp2 sp ep2 plain gpt-oss",
    "tp4 sp qwen3-next", "tp2 sp plain qwen3.5", "tp2 sp ep2 plain qwen3.5-moe", "tp2 sp etp2 qwen3.5-moe",
    "cp4 qwen3.5", "pp2 cp2 ep2 qwen3.5-moe", "tp2 cp2 ring qwen3.5", "pp2 cp2 short whole qwen3.5",
    "cp2 ring plain qwen3.5", "tp2 sp cp2 short whole qwen3-next", "tp2 sp qwen3-next",
)  # fmt: skip
"""Layouts whose parts, and parts of whose models, other layouts have too."""


def marked(name: str) -> object:
    """Return the name of a layout as a parameter, marked by when it is tested."""
    if name in IN_EVERY_RUN:
        return name
    return pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow)


def train(case: Case, dtype: torch.dtype) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Return what each step did, and the weights then; on a rank of a world."""
    divide_world(case.parallel)
    model = tiny_model(**dict(case.model))
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER, dtype=dtype, parallel=case.parallel)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    steps, host = [], HostCopy(dtype)
    for step in range(STEPS):
        samples = random_samples(LENGTHS, seed=step, versions=(2, 3), temperatures=(0.5, 0.8, 2.0))[
            rank::ranks
        ]
        batches = pack(samples, case.budget)
        steps.append(trainer.train_step(batches, TIS, policy_version=3))
        weights = trainer.export()
        assert copied(host, trainer) == host_words(weights)
    return steps, weights


def copied(host: HostCopy, trainer: Trainer) -> dict[str, bytes]:
    """The weights that all ranks together have on their hosts to publish them, on rank 0."""
    mine = host.take(trainer.exported()).wait()
    of_ranks = gathered({name: tensor.words.tobytes() for name, tensor in mine.items()})
    assert sum(map(len, of_ranks)) == len(trainer.exported().shapes), "some tensor is not on one rank alone"
    return (
        {name: words for of_rank in of_ranks for name, words in of_rank.items()}
        if dist.get_rank() == 0
        else {}
    )


def host_words(weights: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: words.words.tobytes() for name, words in host_tensors(weights).items()}


@cache
def alone(model: tuple[tuple[str, object], ...], dtype: torch.dtype) -> list[StepResult]:
    """Return what each step does on one rank: that of this process."""
    return train(Case(1, {}, model), dtype)[0]


@cache
def reference(model: tuple[tuple[str, object], ...]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Return what `train` should return, computed without any of Sluice's code."""
    policy = tiny_model(**dict(model))
    optimizer = reference_optimizer(policy, OPTIMIZER)
    steps = [
        reference_step(
            policy,
            optimizer,
            random_samples(LENGTHS, seed=step, versions=(2, 3), temperatures=(0.5, 0.8, 2.0)),
            loss="tis",
            lr=OPTIMIZER.lr * min(1, (step + 1) / 2),
        )
        for step in range(STEPS)
    ]
    weights = hf_state(policy)
    return steps, {
        name: weights[name]
        for name in weights
        if not (policy.config.tie_word_embeddings and name == "lm_head.weight")
    }


def divided_logits(layout: dict[str, object], model: tuple[tuple[str, object], ...]) -> tuple[Tensor, ...]:
    """This rank's share of the logits of a pack, the sequences of its tokens and their positions in these."""
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    policy = tiny_model(**dict(model))
    [built] = build_chunks(policy.config, dtype=torch.float32, parallel=parallel)
    load_hf_weights([built], policy.config, hf_state(policy))
    [batch] = pack(random_samples(OVER_CHUNKS), 1000)
    context = parallel_state.get_context_parallel_group()
    share = share_of_rank(
        batch, ranks=context.size(), rank=context.rank(), multiple=parallel.tensor,
        min_tokens=parallel.context_min_tokens,
    )  # fmt: skip
    with torch.no_grad():
        return built.logits(share), share.sequence_of_token, share.position_ids


@pytest.mark.parametrize(
    "layout",
    [
        RING | {"context_min_tokens": 100},
        pytest.param({"context": 2}, marks=pytest.mark.slow),
        pytest.param({"context": 2, "context_min_tokens": 1000}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_of_ranks_that_share_sequences_are_those_of_each_sequence_alone(worlds, layout):
    expected = reference_logits(tiny_model(**dict(QWEN3_NEXT)), random_samples(OVER_CHUNKS))
    expected = expected.split(OVER_CHUNKS)
    found = [torch.full_like(each, torch.nan) for each in expected]
    for logits, sequences, positions in worlds.run(2, divided_logits, layout, QWEN3_NEXT):
        for row, sequence, position in zip(logits, sequences.tolist(), positions.tolist(), strict=True):
            if position < OVER_CHUNKS[sequence]:  # others are padding
                found[sequence][position] = row
    assert (torch.cat(found) - torch.cat(expected)).abs().max() < 1e-5


FURTHER_IN_BFLOAT16 = ("dp2 plain", "pp2 tied", "cp2", "cp2 qwen3-next", "dp2 tp2 sp overlapped")


@pytest.mark.first(12, others=pytest.mark.nightly)
@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_steps_follow_plain_torch_adamw_on_any_layout(worlds, name):
    case = CASES[name]
    answers = worlds.run(case.ranks, train, case, torch.float32)
    expected_steps, expected_weights = reference(case.model)
    assert all(steps == answers[0][0] for steps, _ in answers)
    of_ranks = zip(*(steps for steps, _ in answers), strict=True)
    for step, ranks, (loss, norm), single in zip(
        answers[0][0], of_ranks, expected_steps, alone(case.model, torch.float32), strict=True
    ):
        assert step.loss == pytest.approx(loss, abs=3e-6)
        assert step.grad_norm == pytest.approx(norm, rel=4e-6, abs=2e-5)
        assert step.tokens == single.tokens
        assert step.diagnostics == pytest.approx(single.diagnostics, rel=5e-6, abs=1e-5)
        ratios = {name: ratios for rank in ranks for name, ratios in rank.ratios.items()}
        assert ratios.keys() == single.ratios.keys()
        assert all(ratios[name] == pytest.approx(single.ratios[name], rel=1e-4) for name in ratios)
    exported = answers[0][1]
    assert exported.keys() == expected_weights.keys()
    for weight_name, expected in expected_weights.items():
        assert (exported[weight_name] - expected).abs().max() < 1e-5
    assert not any(weights for _, weights in answers[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["tp2 sp", "ep2", *(pytest.param(name, marks=pytest.mark.nightly) for name in FURTHER_IN_BFLOAT16)],
)
def test_in_bfloat16_a_layout_does_what_one_rank_does(worlds, name):
    case = CASES[name]
    [(steps, weights), *_] = worlds.run(case.ranks, train, case, torch.bfloat16)
    for step, single in zip(steps, alone(case.model, torch.bfloat16), strict=True):
        assert step.loss == pytest.approx(single.loss, abs=0.03)
        assert step.grad_norm == pytest.approx(single.grad_norm, rel=0.1)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def load_and_export(layout: dict[str, object], model_changes: dict[str, object], missing: str | None):
    """The weights as they come out of a model that they were loaded into, or why they cannot be."""
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    model = tiny_model(vocab_size=59, **model_changes)
    state = {name: tensor for name, tensor in hf_state(model).items() if name != missing}
    chunks = build_chunks(model.config, dtype=torch.float32, parallel=parallel)
    try:
        load_hf_weights(chunks, model.config, state)
    except ConfigError as error:
        return str(error)
    return export_hf_weights(chunks, model.config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "model_changes"),
    [
        (2, {"tensor": 2}, {"family": "qwen2"}),
        (2, {"tensor": 2}, {"family": "glm4"}),
        (2, {"tensor": 2}, {"family": "glm4", "num_key_value_heads": 1}),
        (2, SP | {"expert": 2}, {"family": "glm4_moe_lite"}),
        (2, {"expert": 2}, {"family": "minimax_m2"}),
        (2, {"tensor": 2}, {"family": "qwen2", "num_key_value_heads": 1}),
        (2, SP | {"expert": 2}, {"family": "glm4_moe", "num_key_value_heads": 1}),
        (4, {"tensor": 4}, {"family": "llama"}),
        (2, SP | {"expert": 2}, {"family": "qwen2_moe"}),
        (2, SP | {"expert": 2}, {"family": "qwen3_moe"}),
        (2, SP | {"expert": 2}, {"family": "deepseek_v3"}),
        (2, {"pipeline": 2}, {"family": "gemma3_text"}),
        (2, SP | {"expert": 2}, {"family": "gpt_oss"}),
        (2, SP | {"expert": 2}, {"family": "qwen3_next"}),
        (2, {"tensor": 2}, {"family": "qwen3_5_text"}),
        (4, SP | {"expert": 2, "expert_tensor": 2}, {"family": "mixtral"}),
        (4, {"tensor": 2, "pipeline": 2}, {"family": "qwen3"}),
    ],
)
def test_shared_weights_come_out_bit_for_bit_as_they_went_in(worlds, ranks, layout, model_changes):
    exported, *others = worlds.run(ranks, load_and_export, layout, model_changes, None)
    state = hf_state(tiny_model(vocab_size=59, **model_changes))
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)
    assert not any(others)


@pytest.mark.slow
def test_every_rank_says_what_one_of_them_misses(worlds):
    missing = "model.layers.1.mlp.down_proj.weight"
    reasons = worlds.run(2, load_and_export, {"pipeline": 2}, {"family": "llama"}, missing)
    assert all(f"missing {missing} [64, 96]" in reason for reason in reasons)
