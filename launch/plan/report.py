"""A plan as text for a terminal, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict

from bus.codec import Json
from launch.plan.plan import GIB, Plan, Question

UNMEASURED = (
    "Measured on H200s: 0.6B and 8B shapes and a small mixture. Other sizes, GPUs and layouts are computed "
    "(docs/plan.md)."
)


def plan_lines(found: Plan, asked: Question) -> Iterator[str]:
    each = ", ".join(f"{name} {_gib(value)}" for name, value in asdict(found.rank).items() if value)
    yield f"{found.model_type}, {found.parameters / 1e9:.2f} billion weights, learner.backend={found.backend}"
    yield (
        f"GPUs      {found.learner_gpus} for the learner, {found.engine_gpus} for engines, each "
        f"{asked.gpu.name} of {asked.gpu.memory_gib:g} GiB"
    )
    yield f"a rank    {_gib(found.rank.total)} GiB of {_gib(found.room)} that can be used: {each}"
    yield f"          {'fits' if found.fits else 'DOES NOT FIT'}"
    if not found.fits:
        yield f"          {_instead(found)}"
    yield f"hosts     learner {_gib(found.learner_host)} GiB of memory, an actor {_gib(found.actor_host)} GiB"
    yield f"disk      a checkpoint {found.checkpoint / 1e9:.1f} GB"
    yield (
        f"a version {found.snapshot / 1e9:.2f} GB as a snapshot, about {found.delta / 1e9:.3f} GB as a delta "
        "at a learning rate of 1e-6"
    )
    if found.kv_tokens:
        yield (
            f"engines   {found.kv_tokens:,} tokens of keys and values each; {found.requests:,} requests of "
            f"the longest length at once"
        )
    length = asked.prompt_tokens + asked.answer_tokens
    generation = "not on GPUs" if found.generation_s is None else _time(found.generation_s)
    yield (
        f"a step    {found.step_tokens:,} tokens in sequences of {length:,}: training {_time(found.step_s)} "
        f"at an MFU of {found.mfu:.2f}, generation {generation}"
    )
    yield f"          {found.waits}"
    yield (
        f"streams   hold {found.stream_bytes / GIB:.2f} GiB of trajectories, {found.stream_s:,.0f} s of "
        f"traffic: a step has {found.step_bytes / GIB:.2f} GiB"
    )
    if found.stream_bytes < found.step_bytes:
        enough = 2 * found.step_bytes >> 20
        yield (
            "          LESS THAN A STEP: actors wait for storage, give "
            f"--bus.streams.trajectories-mib {enough}"
        )
    yield UNMEASURED


def _instead(found: Plan) -> str:
    if not found.instead:
        return "no setting that is tried fits: give more GPUs, or GPUs with more memory"
    return f"fits with {' '.join(found.instead)}"


def _time(value_s: float) -> str:
    if value_s < 0.0995:
        return f"{1e3 * value_s:.3g} ms"
    return f"{value_s:.3g} s" if value_s < 999.5 else f"{value_s:,.0f} s"


def _gib(value: int) -> str:
    return f"{value / GIB:.1f}"


def plan_json(found: Plan) -> dict[str, Json]:
    """Return the plan as one object: bytes, seconds, tokens."""
    return {
        **asdict(found), "fits": found.fits, "waits": found.waits, "instead": list(found.instead),
        "stream_s": found.stream_s,
    }  # fmt: skip
