"""Prints the losses of TRL's trainers as JSON; run in an environment of its own that has TRL."""

import json
import sys
from pathlib import Path

import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

KINDS = {"sft": "SFT", "dpo": "DPO", "reward_model": "Reward"}


def main(kind: str, model: str, rows: list[dict[str, str]], batch_size: int, lr: float, out: str) -> None:
    """Train on the rows once over in their order, and write the loss of each step."""
    trainer_class, config = getattr(trl, f"{KINDS[kind]}Trainer"), getattr(trl, f"{KINDS[kind]}Config")
    losses = []

    class Recording(trainer_class):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append((result[0] if isinstance(result, tuple) else result).item())
            return result

    arguments = config(
        output_dir=f"{out}.trainer", per_device_train_batch_size=batch_size, num_train_epochs=1,
        learning_rate=lr, lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95,
        max_grad_norm=1.0, train_sampling_strategy="sequential", gradient_checkpointing=False, bf16=False,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, optim="adamw_torch",
    )  # fmt: skip
    form = AutoModelForSequenceClassification if kind == "reward_model" else AutoModelForCausalLM
    trained = form.from_pretrained(model, dtype="float32")
    trained.get_input_embeddings().padding_idx = None  # else the row of the padding token is not trained
    tokenizer = AutoTokenizer.from_pretrained(model)
    Recording(
        model=trained, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    ).train()
    Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(**json.loads(Path(sys.argv[1]).read_text()))
