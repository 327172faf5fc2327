"""What of an objective follows from the papers of its loss and rejections where nothing else is set, and
what differs from them where something is. Loads without torch."""

from collections.abc import Sequence
from math import inf

from learner.config.algorithm import Aggregation, AutoAggregation, TokenMean
from learner.config.correction import AutoCorrection, Correction, NoCorrection, Rejection, TokenTIS
from learner.config.loss import Loss
from learner.config.plugin import Choice


def used_aggregation(
    aggregation: Aggregation | AutoAggregation, loss: Loss, rejections: Sequence[Rejection]
) -> Aggregation:
    if not isinstance(aggregation, AutoAggregation):
        return aggregation
    stated, _ = _aggregation_of_paper(loss, rejections)
    return stated or TokenMean()


def used_correction(
    correction: Correction | AutoCorrection, loss: Loss, rejections: Sequence[Rejection]
) -> Correction:
    if not isinstance(correction, AutoCorrection):
        return correction
    if loss.facts.own_ratio:
        return NoCorrection()
    return TokenTIS(truncation_cap=inf) if any(one.whole_ratio for one in rejections) else TokenTIS()


def differences_from_papers(
    aggregation: Aggregation | AutoAggregation, correction: Correction | AutoCorrection, loss: Loss,
    rejections: Sequence[Rejection],
) -> list[str]:  # fmt: skip
    found = []
    stated, paper = _aggregation_of_paper(loss, rejections)
    used = used_aggregation(aggregation, loss, rejections)
    if stated is not None and stated != used:
        found.append(
            f"The aggregation is {_named(used)}, and that of {paper} is {_named(stated)}: leave out "
            f"learner.aggregation if {paper} is what you mean."
        )
    weight = used_correction(correction, loss, rejections)
    whole = weight.is_whole_ratio or loss.facts.own_ratio
    capped = [one for one in rejections if one.whole_ratio and not whole]
    return found + [
        f"The correction is {_named(weight)}, and {one.paper} weighs what it keeps by the whole ratio: leave "
        f"out learner.correction if {one.paper} is what you mean."
        for one in capped
    ]


def _aggregation_of_paper(loss: Loss, rejections: Sequence[Rejection]) -> tuple[Aggregation | None, str]:
    """Return the aggregation that the papers state, and which paper: that of the loss, else of the first
    rejection that states one."""
    stated = [
        (loss.facts.aggregation, loss.facts.paper),
        *((one.aggregation, one.paper) for one in rejections),
    ]
    return next((pair for pair in stated if pair[0] is not None), (None, ""))


def _named(choice: Choice) -> str:
    settings = choice.model_dump(exclude={"type"}, exclude_none=True)
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{choice.type} ({shown})" if shown else choice.type
