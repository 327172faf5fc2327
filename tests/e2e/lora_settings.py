"""Settings of a small run with adapters."""

SMALL = (
    "--preset", "sort", "--learner.steps", "4", "--learner.lora.rank", "4", "--learner.lora.alpha", "8",
    "--learner.reference.kl-coef", "0.01", "--learner.target-accuracy", "none",
    "--warmup.steps", "24", "--warmup.batch-size", "16", "--warmup.optimizer.lr", "1e-2",
    "--warmup.optimizer.warmup-steps", "4",
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "0",
)  # fmt: skip
