"""One message of each kind."""

import dataclasses
import importlib
import pkgutil

import msgpack
import numpy as np

import bus
from bus.agent_rewards import AgentReward
from bus.codec import Message, encode
from bus.connection.answers import Refused
from bus.device_messages import DeviceHold, DeviceUser
from bus.engine_nodes import EngineNode
from bus.evaluation_messages import EvaluationResult, EvaluationTask, HeldOutAnswers, PromptSet
from bus.images import ImageCount
from bus.messages import (
    AdaptedBase,
    BlobRef,
    DeadLetter,
    DeltaRef,
    GroupRejected,
    KeptVersion,
    Metrics,
    ModelFiles,
    Pace,
    PolicyManifest,
    Probe,
    Prompt,
    RewardGiven,
    RoleHolder,
    RunIdentity,
    RunRecord,
    SnapshotWanted,
    Status,
)
from bus.requests import (
    BatchLease,
    BatchRequest,
    Closed,
    CloseRequest,
    DataAccepted,
    Done,
    EngineChange,
    FullGroups,
    FullGroupsRequest,
    GroupRef,
    GroupStatus,
    GroupStatusRequest,
    GroupsUnreadable,
    Issued,
    IssuedRequest,
    KeptTurnsRequest,
    LearnerResumed,
    LeaseRequest,
    LeaseState,
    Located,
    LocateRequest,
    NewData,
    Profiled,
    ProfileRequest,
    ReadRequest,
    StepCommitted,
    StepGroups,
    StepGroupsRequest,
    StoredGroups,
    StoredRequest,
    Unsettled,
    UnsettledRequest,
    Waiting,
)
from bus.security.role_keys import RoleKeys, new_seed, public_key
from bus.security.signatures import SignedRecord
from bus.trajectory import ExpertsApart, TrajectoryBatch
from bus.weight_requests import (
    BlobAccess,
    BlobAccessAsked,
    BroadcastBegin,
    BroadcastEnd,
    BroadcastWanted,
    ExpertsPlace,
    ExpertsPlaceAsked,
    GroupBeat,
    GroupLeft,
    OfferedBucket,
    PartFailed,
    PartsAsked,
    PartsFound,
    PartSource,
    SignedOffer,
    WeightOffer,
)
from tests.factories import make_lease, make_trajectory, make_turn

MODULES = [importlib.import_module(module.name) for module in pkgutil.walk_packages(bus.__path__, "bus.")]
CLASSES = [
    c
    for module in MODULES
    for c in vars(module).values()
    if isinstance(c, type) and issubclass(c, Message) and c.tag and c.__module__ == module.__name__
]
"""Every message of the bus, whichever file declares it."""


BLOB = BlobRef(subject="sluice.test.weights.7", chunks=2, size_bytes=700_000, digest="ab" * 16)
DELTAS = (
    DeltaRef(base_version=4, policy_version=5, blob=BLOB),
    DeltaRef(base_version=5, policy_version=7, blob=BLOB),
)


PROBE = Probe(token_ids=((1, 2, 3), (4, 5)), logprobs=((-0.5, -1.25), (-2.0,)))
KEPT = KeptVersion(policy_version=3, snapshot=BLOB)
ADAPTED = AdaptedBase(weights=BLOB, scale=2.0, rank=8, modules=("mlp.up_proj", "self_attn.q_proj"))
POLICY = PolicyManifest(
    policy_version=7, incarnation="a1", snapshot=BLOB, model=BLOB, stage="rl", trains_from=2, deltas=DELTAS,
    probe=PROBE, kept=(KEPT,), adapted=ADAPTED,
)  # fmt: skip


CHAT = Prompt(
    content=[{"role": "user", "content": "2+2?"}], label=None, metadata={"level": 3, "tags": ["a", None]}
)


EVALUATED = EvaluationResult(
    policy_version=1, incarnation="a", sampled=0.5, greedy=1.0, prompts=9, seconds=2.5,
    oldest_version=1, newest_version=3, failed=2,
)  # fmt: skip


UNTRAINED = dataclasses.replace(make_trajectory(1, 0), trainable=False, loss_mask=np.zeros(8, bool))
BUCKET = OfferedBucket(
    group="sluice-a1-0",
    host="10.0.0.1",
    port=29500,
    backend="nccl",
    first_rank=1,
    world_size=2,
    policy_version=7,
    names=("scalar", "embedding"),
    dtypes=("bfloat16", "float32"),
    shapes=((), (40, 32)),
    digests=(bytes(32), bytes(range(32))),
)


EXAMPLES = (
    HeldOutAnswers(
        policy_version=4,
        prompt=2,
        batch=TrajectoryBatch(trajectories=(UNTRAINED,)),
        data_set="aime",
        label="7",
    ),
    RoleKeys(revision=3, keys={"actor": [public_key(new_seed())], "judge": []}),
    SignedRecord(key="U", sequence=7, content=b"message", signature=b"signature"),
    CHAT,
    PROBE,
    Pace(slower=2.5),
    DELTAS[0],
    KEPT,
    ADAPTED,
    PartFailed(part=0, url="https://10.0.0.2:8000", is_damaged=True),
    PartSource(part=0, url="https://10.0.0.1:8000"),
    PartsAsked(
        blob="w8",
        host="host-1",
        url="https://10.0.0.1:8000",
        have=b"\0\1",
        failed=(PartFailed(part=0, url="https://10.0.0.2:8000", is_damaged=True),),
    ),
    PartsFound(
        sources=(
            PartSource(part=0, url="https://10.0.0.1:8000", access=BlobAccess(token="t", certificate="c")),
        )
    ),
    BlobAccess(token="t", certificate="-----BEGIN CERTIFICATE-----"),
    BlobAccessAsked(),
    EngineChange(action="join", engine="http://10.0.0.1:30000"),
    BroadcastWanted(incarnation="a1", policy_version=7, group="", ranks=2, device="cuda", nonce="a0"),
    BUCKET,
    WeightOffer(nonce="a0", buckets=(BUCKET,)),
    SignedOffer(record=b"signed"),
    BroadcastBegin(group="sluice-a1-0", first_rank=1, policy_version=7),
    BroadcastEnd(group="sluice-a1-0", policy_version=7),
    GroupBeat(group="sluice-a1-0", first_rank=1),
    GroupLeft(group="sluice-a1-0"),
    DeviceHold(incarnation="a1", number=3, host="6f1c", held=True),
    DeviceUser(actor="a-1", host="6f1c", yielded_to="a1.3"),
    EngineNode(process="b2", engine="a1", host="6f1c", ended="it was stopped", shared_file="/shared/a1"),
    SnapshotWanted(incarnation="a1", policy_version=7, reason="chunk 1 of 3 is not on the bus"),
    make_lease(3),
    make_trajectory(3, 1),
    TrajectoryBatch(trajectories=(make_trajectory(1, 0), make_trajectory(1, 1))),
    TrajectoryBatch(trajectories=()),
    ExpertsApart(digest=bytes(range(32)), sizes=(768, 0), moe_layers=4, experts_per_token=2),
    TrajectoryBatch(trajectories=(make_trajectory(1, 0),)).without_experts(b"s" * 32),
    ExpertsPlaceAsked(),
    ExpertsPlace(url="https://10.0.0.1:40000", access=BlobAccess(token="t", certificate="c")),
    make_turn(3, 1, 2),
    TrajectoryBatch(trajectories=(), turns=(make_turn(3, 1, 2), make_turn(3, 0, 0, tokens=0))),
    GroupRejected(lease_id=3, reason="zero_variance", detail="all 1.0", actor="a"),
    IssuedRequest(shard=1),
    StepGroupsRequest(step=4),
    StepGroups(
        step=4,
        groups=(GroupRef(lease_id=3, shard=1, weight=0.5, tokens=70),),
        incarnation="a1",
        trained_through=3,
        trains_from=1,
        stage="rl",
    ),
    Issued(
        next_id=12,
        seen=5,
        run="f00",
        vocabulary=151_936,
        newest_version=7,
        rolling_out=(8, 10),
        versions=(6, 7),
    ),
    UnsettledRequest(),
    Unsettled(lease_ids=(3, 5)),
    BLOB,
    POLICY,
    ModelFiles(names=("config.json", "empty"), contents=(b"{}", b"")),
    BatchRequest(step=1, policy_version=2, incarnation="a1"),
    GroupRef(lease_id=1, shard=0),
    BatchLease(step=1, groups=(GroupRef(lease_id=1, shard=0), GroupRef(lease_id=2, shard=1))),
    Waiting(reason="2 of 4 groups"),
    StepCommitted(step=10, incarnation="a1"),
    LearnerResumed(step=10, incarnation="a2"),
    GroupsUnreadable(step=3, lease_ids=(4, 7), incarnation="a1", reason="torn"),
    Refused(reason="fenced"),
    Done(),
    ReadRequest(lease_ids=(1, 2, 3)),
    LocateRequest(lease_ids=(1, 2, 3), host="here"),
    Located(
        host="here",
        directory="/replay",
        device=2,
        inode=9,
        segments=("segment_00000001", "segment_00000004-00000006"),
        segment_of=np.array([0, 1, 1], np.int32),
        rows=np.array([3, 0, 1], np.int32),
    ),
    StoredRequest(after=5),
    StoredGroups(shard=1, after=5, lease_ids=(7, 9), total=7, tokens=(16, 20)),
    StoredGroups(shard=1, after=5, lease_ids=(7,), total=7, tokens=(16,), images=(ImageCount(2, 12),)),
    EvaluationTask(policy=POLICY, prompts=BLOB),
    PromptSet(prompts=(CHAT, Prompt(content="plain"))),
    EVALUATED,
    Metrics(source="learner", step=3, time_s=1.75e9, values={"train/loss": 0.5, "train/note": "x"}),
    Status(source="a", role="actors", doing="rolls out", pid=1, peak_rss_bytes=2, values={"busy": 3}),
    DeadLetter(subject="s", reason="r", data=b"\x00\xff", origin="9", kind="version", actor="a"),
    RewardGiven(trajectory_id="g00000012.3", reward=-0.5, source="judge"),
    FullGroupsRequest(lease_ids=(1, 2)),
    FullGroups(lease_ids=(2,)),
    RunRecord(name="test", config_json="{}"),
    RoleHolder(incarnation="a1", host="h", pid=9),
    RunIdentity(identity="ab", host="h", directory="/runs/r"),
    LeaseRequest(lease_id=3, attempt=True),
    LeaseState(state="open", policy_version=2),
    GroupStatusRequest(lease_id=3),
    GroupStatus(group_size=4, samples=(0, 2), rewards=(AgentReward("default", "solver", 0, 1.0),)),
    KeptTurnsRequest(lease_id=3),
    ProfileRequest(steps=3),
    Profiled(directory="/runs/r/profiles", lines=("3 steps", "idle")),
    NewData(prompts=BLOB, keep_old=True, source="new.jsonl"),
    DataAccepted(first_lease=9, prompts=12),
    CloseRequest(lease_ids=(3, 5)),
    Closed(lease_ids=(3,)),
)


def wire(message: Message, **changes: object) -> bytes:
    """The encoded message with some fields replaced; `...` removes one."""
    tag, version, body = msgpack.unpackb(encode(message))
    body |= changes
    return msgpack.packb([tag, version, {k: v for k, v in body.items() if v is not ...}])
