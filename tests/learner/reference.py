"""Training written from the formulas, with transformers and torch alone."""

import numpy as np
import torch

from tests.learner.tiny import reference_logits


def reference_optimizer(model, config):
    decayed, exempt = [], []
    for name, parameter in model.named_parameters():
        is_exempt = parameter.dim() == 1 or name.endswith("bias")  # of experts, biases have two dimensions
        (exempt if is_exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def reference_step(model, optimizer, samples, *, loss, lr, factor=1.0, logits_of=reference_logits):
    """The same update in plain torch, written from the formulas; of `factor` times the mean over tokens."""
    logits = logits_of(model, samples)
    total, count = 0.0, 0
    for sample, logprobs in zip(samples, _logprobs(logits, samples), strict=True):
        mask = torch.from_numpy(sample.loss_mask[1:])
        weight = 1.0
        if loss == "tis":
            ratio = torch.exp(logprobs.detach() - torch.from_numpy(sample.streams["behaviour_logprobs"][1:]))
            advantages = np.broadcast_to(sample.streams["advantages"], len(sample.token_ids))[1:]
            weight = torch.tensor(advantages).float() * torch.minimum(ratio, torch.tensor(2.0))
        total = total - (weight * logprobs)[mask].sum()
        count += int(mask.sum())
    mean = factor * total / count
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    mean.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return mean.item(), norm.item()


def reference_ratios(model, samples, *, cap):
    """Mean, least and largest importance ratio of each sample by name, and the share of those above `cap`."""
    found = {}
    with torch.no_grad():
        each = [*_logprobs(reference_logits(model, samples), samples)]
    for sample, logprobs in zip(samples, each, strict=True):
        ratios = np.exp(logprobs.double().numpy() - sample.streams["behaviour_logprobs"][1:])
        ratios = ratios[sample.loss_mask[1:]]
        if len(ratios):
            found[sample.name] = (ratios.mean(), ratios.min(), ratios.max(), (ratios > cap).mean())
    return found


def _logprobs(logits, samples):
    """Yield the log-probs [L - 1] of the tokens of each sample behind its first, at their temperatures."""
    start = 0
    for sample in samples:
        end = start + len(sample.token_ids)
        temperatures = np.broadcast_to(sample.streams["temperatures"], len(sample.token_ids))[1:]
        scaled = logits[start : end - 1] / torch.tensor(temperatures)[:, None].float()
        distribution = torch.log_softmax(scaled, dim=-1)
        yield distribution.gather(-1, torch.from_numpy(sample.token_ids[1:]).long()[:, None])[:, 0]
        start = end
