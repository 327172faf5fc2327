"""Names of everything that is built in where settings choose an algorithm."""

from typing import get_args

from learner.config.advantage import AdvantageConfig
from learner.config.algorithm import UsedAggregation
from learner.config.correction import UsedCorrection, UsedRejection
from learner.config.loss import SupervisedLoss, UsedLoss
from learner.config.plugin import Choice, Plugin


def built_in(union: object) -> dict[str, type[Choice]]:
    """Return the records of a union of settings by name."""
    kinds = (kind for kind in get_args(union) if not issubclass(kind, Plugin))
    return {kind.model_fields["type"].default: kind for kind in kinds}


LOSSES = built_in(UsedLoss)
CORRECTIONS = built_in(UsedCorrection)
WEIGHING = sorted(set(CORRECTIONS) - {"none"})
REJECTIONS = built_in(UsedRejection)
ADVANTAGES = built_in(get_args(AdvantageConfig)[0])
AGGREGATIONS = built_in(UsedAggregation)
SUPERVISED = built_in(get_args(SupervisedLoss)[0])
RECORDS = [
    *(
        kind
        for kinds in (SUPERVISED, LOSSES, CORRECTIONS, REJECTIONS, ADVANTAGES, AGGREGATIONS)
        for kind in kinds.values()
    )
]
