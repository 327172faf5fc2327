"""Tells how much longer a server stands still where it checks what the learner broadcasts, on a paced link.

`PYTHONPATH=tests python -m benchmarks.checked_broadcast MB_PER_S` prints a line of JSON. The link is a pause
for the time that a bucket takes; hashing and loading are the server's own."""

import hashlib
import json
import sys
import time
from collections import defaultdict

import torch

from actors.engines.sglang.in_server.sluice_digests import expect_1

BUCKETS, BUCKET_BYTES, ROUNDS = 16, 64 << 20, 3


class Model(torch.nn.Module):
    """A model that copies what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.empty(BUCKET_BYTES, dtype=torch.uint8)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors."""
        for _, tensor in weights:
            self.tensor.copy_(tensor)


def expect(model: Model, digests: dict[str, str]) -> None:
    """Have the model check tensors of these digests."""
    text = torch.frombuffer(bytearray(json.dumps(digests).encode()), dtype=torch.uint8)
    expect_1(model, [("digests", text)])


def measure(mb_per_s: float) -> dict[str, list[float]]:
    """Return the seconds of an update without digests, with them, and with each bucket checked before the
    next is received."""
    sent = torch.randint(0, 256, (BUCKET_BYTES,), dtype=torch.uint8)
    digest = hashlib.sha256(sent.numpy().data).hexdigest()
    digests = {str(n): digest for n in range(BUCKETS)}
    found: dict[str, list[float]] = defaultdict(list)
    for n in range(ROUNDS + 1):  # the first warms up
        for way in ("unchecked", "checked", "one_by_one"):
            model = Model()
            if way == "checked":
                expect(model, digests)
            began = time.perf_counter()
            for name in digests:
                time.sleep(BUCKET_BYTES / 1e6 / mb_per_s)
                if way == "one_by_one":
                    expect(model, {name: digest})
                model.load_weights([(name, sent)])
            if n:
                found[way].append(round(time.perf_counter() - began, 3))
    return dict(found)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(float(sys.argv[1]))) + "\n")
