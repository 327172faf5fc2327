"""Turns of rollouts that have not ended, as messages to a shard and back."""

from collections.abc import Iterable

import numpy as np

from actors.engines.base import Generation
from actors.policy.rollout_turns import SampledTurn
from bus.messages import Lease
from bus.older_kv import kv_versions_from, older_kv_bytes
from bus.trajectory import KeptTurn


def turn_message(turn: SampledTurn, lease: Lease, rollout: int, actor: str) -> KeptTurn:
    """Return the message of a turn of a rollout of `lease`."""
    sampled, routed = turn.generation, turn.generation.routed_experts
    layers, per_token = (0, 0) if routed is None else routed.shape[1:]
    return KeptTurn(
        lease_id=lease.lease_id,
        rollout=rollout,
        number=turn.number,
        context=turn.context,
        finish_reason=sampled.finish_reason,
        token_ids=sampled.token_ids.astype(np.int32, copy=False),
        behaviour_logprobs=sampled.logprobs.astype(np.float32, copy=False),
        policy_versions=sampled.policy_versions.astype(np.int32, copy=False),
        trained=turn.trained,
        actor=actor,
        run=lease.run,
        routed_experts=b"" if routed is None else routed.tobytes(),
        moe_layers=layers,
        experts_per_token=per_token,
        expert_bytes=1 if routed is None else routed.itemsize,
        kept_counts=b"" if sampled.kept is None else sampled.kept.counts.tobytes(),
        kept_tokens=b"" if sampled.kept is None else sampled.kept.token_ids.tobytes(),
        older_kv=older_kv_bytes(sampled.kv_versions, sampled.policy_versions),
    )


def turns_by_rollout(messages: Iterable[KeptTurn]) -> dict[int, list[SampledTurn]]:
    """Return the turns in these messages, which are of one lease, by rollout."""
    found: dict[int, list[SampledTurn]] = {}
    for message in messages:
        routed = np.frombuffer(message.routed_experts, "u1" if message.expert_bytes == 1 else "<u2")
        shape = -1, message.moe_layers, message.experts_per_token
        generation = Generation(
            message.token_ids,
            message.behaviour_logprobs,
            message.policy_versions,
            message.finish_reason,
            routed.reshape(shape) if len(routed) else None,
            message.kept_sets,
            kv_versions_from(message.older_kv, message.policy_versions),
        )
        turn = SampledTurn(message.number, message.context, generation, message.trained)
        found.setdefault(message.rollout, []).append(turn)
    return found
