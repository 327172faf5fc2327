"""Bytes of a learner's rank and of its host, and what an engine has left for keys and values: formulas alone.
Each states what it counts and why; docs/plan.md holds them against what was measured."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from transformers import PretrainedConfig

from launch.plan.sizes import Weight, adapter_elements, layer_elements, size
from learner.config.learner import LearnerConfig
from learner.config.parallel import ParallelConfig
from learner.config.warmup import WarmupConfig

FLOAT32 = 4
CUDA_LOGITS_BYTES, CPU_LOGITS_BYTES = 2 << 30, 4 << 20
"""What `LOGITS_BYTES` of learner/backends/output/policy_output.py is on a GPU and on a CPU, as float32."""
LEAST_ROWS = 256
"""Least rows of logits at a time, as there."""
UNFUSED = 1.3
"""Activations of a CPU, whose norms, gates and rotations keep intermediates, in units of a GPU's: 1.4 MB a
token of a SmolLM2-135M in float32, where the kernels of a GPU would keep 1.1 MB."""
PROCESS_BYTES = 3 << 30
"""Host memory of a learner's process with torch and CUDA loaded, besides what is counted here."""
ACTOR_BYTES = 1 << 30
"""The same of an actor's process."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the device of one rank of the learner, at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    """Main weights, where they are others than the model's, and moments."""
    activations: int
    logits: int
    """Logits of a chunk of tokens, and the gradient of the output layer."""
    published: int = 0
    """Copy of the rank's share of the published weights, by which it finds what has changed."""

    @property
    def state(self) -> int:
        """Return the bytes that stay between two steps."""
        return self.weights + self.gradients + self.optimizer + self.published

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the formulas need to know of a model and its training."""

    hf_config: PretrainedConfig
    weights: Sequence[Weight]
    frozen: frozenset[str]
    item_bytes: int
    on_gpu: bool

    @property
    def layers(self) -> int:
        return size(self.hf_config.get_text_config(), "num_hidden_layers")

    @property
    def parameters(self) -> int:
        return sum(weight.elements for weight in self.weights)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Elements on one rank: `shared` are those of all data-parallel ranks alike, `experts` of those that have
    the same experts."""

    shared: int = 0
    experts: int = 0


def learner_rank(model: Model, learner: LearnerConfig, ranks: int, tokens: int) -> RankMemory:
    """Return the memory of the rank that has the most, of so many, with micro-batches of so many tokens."""
    published = _compared_elements(model, learner) * model.item_bytes // ranks if ranks > 1 else 0
    if learner.backend == "fsdp":
        return replace(_fsdp_rank(model, learner, ranks, tokens), published=published)
    stages = range(learner.parallel.pipeline)
    most = max((_stage(model, learner, ranks, tokens, each) for each in stages), key=lambda one: one.total)
    return replace(most, published=published)


def _compared_elements(model: Model, learner: LearnerConfig) -> int:
    """Return how many elements several ranks compare with those of the version before: of adapters alone,
    where these are published, and none where rank 0 gathers what they are merged into."""
    if not learner.lora.exists:
        return model.parameters
    return adapters(model, learner) if learner.lora.publish == "adapter" else 0


def adapters(model: Model, learner: LearnerConfig) -> int:
    """Return how many elements the adapters of a model have."""
    lora = learner.lora
    return sum(adapter_elements(one, lora.rank, lora.targets, experts=lora.experts) for one in model.weights)


def _stage(model: Model, learner: LearnerConfig, ranks: int, tokens: int, stage: int) -> RankMemory:
    """Return the memory of a rank of one stage of Megatron's pipeline.

    Weights are of the model's dtype. Gradients are float32 of all trained weights of the rank: they are added
    up over micro-batches before ranks share them. The optimizer has float32 main weights, unless the model's
    are float32, and two moments; with `distributed_optimizer` data-parallel ranks share them."""
    parallel, lora = learner.parallel, learner.lora
    mine = _weights_of_stage(model, parallel, stage)
    present = _counts(((one, one.elements) for one in mine), parallel)
    trained = present
    if lora.exists:
        pairs = [(one, adapter_elements(one, lora.rank, lora.targets, experts=lora.experts)) for one in mine]
        trained = _counts(pairs, parallel)
        present = _Counts(present.shared + trained.shared, present.experts + trained.experts)
    elif model.frozen:
        kept = [(one, one.elements) for one in mine if one.name not in model.frozen]
        trained = _counts(kept, parallel)
    main = FLOAT32 if model.item_bytes < FLOAT32 else 0
    optimizer = 0.0
    on_device = 1 - learner.optimizer.offload
    for count, sharers in zip(
        (trained.shared, trained.experts), _optimizer_sharers(parallel, ranks), strict=True
    ):
        optimizer += count * (main + moment_bytes(learner)) / sharers * on_device
    activations, logits = _passes(model, learner, tokens, stage)
    return RankMemory(
        weights=(present.shared + present.experts) * model.item_bytes,
        gradients=(trained.shared + trained.experts) * FLOAT32,
        optimizer=round(optimizer),
        activations=activations,
        logits=logits,
    )


def moment_bytes(learner: LearnerConfig) -> int:
    """Return the bytes of a weight's moments: two of AdamW, or Muon's one, which nearly all weights have."""
    if learner.optimizer.matrices == "muon":
        return FLOAT32
    return 2 * (2 if learner.optimizer.state_dtype == "bfloat16" else FLOAT32)


def _optimizer_sharers(parallel: ParallelConfig, ranks: int) -> tuple[int, int]:
    """Return how many ranks share the optimizer's state of ordinary weights, and of experts."""
    if not parallel.distributed_optimizer:
        return 1, 1
    dense = ranks // (parallel.tensor * parallel.pipeline)  # context ranks share it too
    return max(1, dense), max(1, ranks // (parallel.expert * parallel.expert_tensor * parallel.pipeline))


def _weights_of_stage(model: Model, parallel: ParallelConfig, stage: int) -> list[Weight]:
    """Return the weights of a stage: its layers, the embedding in the first, the output layer in the last,
    where it has a copy if it is tied."""
    stages, layers = parallel.pipeline, _layers_of_stage(model.layers, parallel.pipeline, stage)
    last = stage == stages - 1
    tied = not any(one.sharing == "output" for one in model.weights)
    found = []
    for one in model.weights:
        if one.layer is not None:
            wanted = one.layer in layers
        elif one.sharing == "embedding":
            wanted = stage == 0 or (last and tied)
        else:
            wanted = last
        found += [one] if wanted else []
    return found


def _layers_of_stage(layers: int, stages: int, stage: int) -> range:
    each = -(-layers // stages)
    return range(stage * each, min(layers, (stage + 1) * each))


def _counts(pairs: Iterable[tuple[Weight, int]], parallel: ParallelConfig) -> _Counts:
    shared = experts = 0
    for one, elements in pairs:
        if one.sharing == "expert":
            experts += elements // (parallel.expert * parallel.expert_tensor)
        elif one.sharing == "whole":
            shared += elements
        elif one.sharing == "divided":
            shared += elements // parallel.tensor
        else:  # rows of the vocabulary, padded so that ranks have equally many
            shared += -(-one.shape[0] // parallel.tensor) * (elements // one.shape[0])
    return _Counts(shared, experts)


def _passes(model: Model, learner: LearnerConfig, tokens: int, stage: int) -> tuple[int, int]:
    """Return the bytes of activations and of logits of a rank of a stage. With full recompute only the input
    of each layer stays, and one layer is computed again at a time. The first stage of a pipeline has begun as
    many micro-batches as there are stages when the first comes back (arXiv:2104.04473, section 2.2)."""
    parallel = learner.parallel
    mine = -(-tokens // parallel.context)
    of_norms = parallel.tensor if parallel.sequence else 1
    hidden = size(model.hf_config.get_text_config(), "hidden_size")
    kept = [
        layer_elements(model.hf_config, layer)
        for layer in _layers_of_stage(model.layers, parallel.pipeline, stage)
    ]
    each = [one.of_norms / of_norms + one.divided / parallel.tensor for one in kept]
    if learner.backend == "fsdp":
        # Attention takes copies of keys and values for grouped queries, and sums of the residual stream.
        each = [elements + 2 * hidden for elements in each]
    in_flight = parallel.pipeline - stage
    more = _exchanged(model.hf_config.get_text_config(), parallel)
    each = [elements + more for elements in each]
    layers = sum(each) * in_flight
    if parallel.recompute == "full":
        layers = len(each) * hidden / of_norms * in_flight + max(each, default=0.0)
    scale = model.item_bytes * (1.0 if model.on_gpu else UNFUSED)
    logits = 0
    if stage == parallel.pipeline - 1:
        logits = _logits(model, learner, mine, parallel.tensor)
    return round(layers * mine * scale), logits


def _exchanged(config: PretrainedConfig, parallel: ParallelConfig) -> int:
    """Return the elements of a token that a layer keeps of what ranks exchange: with `context` the keys and
    values of all ranks as they came and in the order of sequences, with `expert` the copies of a token for
    its experts, and of their results, as sent and as received."""
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    found = 0
    if parallel.context > 1 and parallel.context_attention == "gather":
        width = size(config, "head_dim") or hidden // heads
        keys = (size(config, "num_key_value_heads") or heads) * width
        found += 2 * 2 * keys * parallel.context // parallel.tensor
    if parallel.expert > 1:
        found += 4 * hidden * size(config, "num_experts_per_tok")
    return found


def _logits(model: Model, learner: LearnerConfig, tokens: int, tensor: int) -> int:
    """Return the bytes of a chunk's logits, whose gradient is written over them, and of the gradient of the
    output layer, which is float32 while chunks are added up and the model's dtype when it is handed on."""
    config = model.hf_config.get_text_config()
    columns, hidden = -(-size(config, "vocab_size") // tensor), size(config, "hidden_size")
    budget = CUDA_LOGITS_BYTES if model.on_gpu else CPU_LOGITS_BYTES
    rows = min(tokens, max(LEAST_ROWS, budget // (FLOAT32 * columns)))
    logits = rows * columns * model.item_bytes * (1 if model.on_gpu else 3)  # a CPU has softmax beside them
    frozen = learner.lora.exists or any(
        one.sharing in ("embedding", "output") and one.name in model.frozen for one in model.weights
    )
    return logits + (0 if frozen else columns * hidden * (FLOAT32 + model.item_bytes))


def _fsdp_rank(model: Model, learner: LearnerConfig, ranks: int, tokens: int) -> RankMemory:
    """Return the memory of a rank of FSDP2.

    Main weights, gradients and moments are float32, and ranks share all of them. Layers are gathered as the
    model's dtype: all of them stay where one rank is alone and recomputes nothing; else two at a time, beside
    what lies outside the layers. Frozen weights under adapters lie as the model's dtype alone."""
    lora, parallel = learner.lora, learner.parallel
    on_device = 0 if learner.optimizer.offload else 1
    total = model.parameters
    trained = sum(one.elements for one in model.weights if one.name not in model.frozen)
    stored = total * FLOAT32
    if lora.exists:
        trained = sum(
            adapter_elements(one, lora.rank, lora.targets, experts=lora.experts) for one in model.weights
        )
        stored = total * model.item_bytes + trained * FLOAT32
    gathered = 0
    is_rounded = model.item_bytes < FLOAT32
    if ranks > 1 or (is_rounded and not lora.exists):
        kept = ranks == 1 and parallel.recompute == "none" and on_device
        gathered = (total if kept else _outside_and_two_layers(model)) * model.item_bytes
    activations, logits = _passes(model, learner, tokens, 0)
    return RankMemory(
        weights=round(stored / ranks * on_device) + gathered,
        gradients=round(trained * FLOAT32 / ranks * on_device),
        optimizer=round(trained * moment_bytes(learner) / ranks * on_device),
        activations=activations,
        logits=logits,
    )


def _outside_and_two_layers(model: Model) -> int:
    outside = sum(one.elements for one in model.weights if one.layer is None)
    layers = [0] * model.layers
    for one in model.weights:
        if one.layer is not None:
            layers[one.layer] += one.elements
    return outside + 2 * max(layers, default=0)


def held_policies(
    model: Model, learner: LearnerConfig, warmup: WarmupConfig, rank: RankMemory, ranks: int
) -> int:
    """Return the host memory of a rank for frozen policies and, beside them, the current one
    (learner/backends/contract/frozen_policies.py): what is trained of adapters, else all weights as they lie
    in the backend. The reference of a loss over pairs and that of reinforcement learning take turns."""
    to_initial = warmup.steps > 0 and warmup.loss.facts.to_reference
    policies = sum(one.path is not None for one in learner.used_teachers.values())
    policies += to_initial or learner.reference.kl_coef > 0
    if not policies:
        return 0
    if learner.lora.exists:
        each = rank.gradients * (FLOAT32 if learner.backend == "fsdp" else model.item_bytes) // FLOAT32
    elif learner.backend == "fsdp":
        each = model.parameters * FLOAT32 // ranks
    else:
        each = rank.weights
    return (policies + 1) * each


def publication_copies(model: Model, learner: LearnerConfig, ranks: int) -> int:
    """Return how many copies of what is published the learner has at least. Two sets of buffers take turns
    (learner/publication/host_copy.py); a rank that is alone on a CPU keeps but the version that the next
    delta is made from (lent_weights.py)."""
    if model.on_gpu or ranks > 1:
        return 2
    return int(learner.publication.snapshot_every > 1)


def learner_host(
    model: Model, learner: LearnerConfig, warmup: WarmupConfig, rank: RankMemory, published: int, ranks: int
) -> int:
    """Return the host memory of the learner's first host.

    Publications have copies, which all ranks divide unless adapters are trained, and what is written beside
    them has one while the disk is slow (snapshot_writer.py); of what each rank has
    on its GPU a checkpoint makes a copy (learner/host_memory/copies.py); frozen policies lie on the
    host, and the current one beside them; so does what the optimizer offloads."""
    here = max(1, min(ranks, learner.world.processes))
    saved = (rank.weights + rank.optimizer) * here if model.on_gpu else 0
    held = held_policies(model, learner, warmup, rank, ranks) * here
    offloaded = 0.0
    if learner.optimizer.offload and learner.optimizer.offload_directory is None:
        each = FLOAT32 + moment_bytes(learner) + (FLOAT32 if learner.backend == "fsdp" else 0)
        offloaded = model.parameters * each * learner.optimizer.offload * here / ranks
    on_cpu = 0 if model.on_gpu else rank.total * here
    beside = (learner.publication.snapshot_every > 1) + bool(learner.publication.keep_versions)
    if ranks > 1 and not learner.lora.exists:  # rank 0 has the frozen weights below adapters
        published = published * here // ranks
    copies = publication_copies(model, learner, ranks) + beside
    return round(copies * published + saved + held + offloaded + on_cpu + PROCESS_BYTES * here)


def actor_host(published: int, *, embedded: bool) -> int:
    """Return the host memory of an actor's process: the newest weights and those before, a third time while
    they arrive (docs/engines.md), and a fourth as an embedded engine's own, which has another dtype."""
    return published * (4 if embedded else 3) + ACTOR_BYTES


def checkpoint_bytes(model: Model, learner: LearnerConfig) -> int:
    """Return the size of a checkpoint: weights, main weights and moments of all ranks together."""
    if learner.lora.exists:
        return adapters(model, learner) * (FLOAT32 + moment_bytes(learner) + model.item_bytes)
    main = FLOAT32 if model.item_bytes < FLOAT32 else 0
    return model.parameters * (model.item_bytes + main + moment_bytes(learner))


def without_passes(rank: RankMemory) -> RankMemory:
    """Return what a rank has before its first pass."""
    return replace(rank, activations=0, logits=0)
