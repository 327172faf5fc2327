"""A rank of a server as SGLang has them: it meets the learner in a group and takes what that broadcasts.

Run as a process it can be killed. It says when it is up, which takes seconds. The body of a join is the first
line of its standard input; each further one is that of an update."""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


class GlooRank:
    """Rank 1 of the group that a body of /init_weights_update_group names; raises what gloo raises."""

    def __init__(self, body, timeout_s=60.0):
        name, timeout = body["group_name"], timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            body["master_address"], body["master_port"], body["world_size"], is_master=False, timeout=timeout
        )
        for prefix in (name, f"{name}/", "cpu/"):  # as torch's own helper nests them
            store = dist.PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], timeout)

    def receive(self, body):
        """The tensors of a body of /update_weights_from_distributed, by name."""
        received = {}
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._group.broadcast([received[name]], options).wait()
        return received


def say(word):
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    say("up")
    rank = GlooRank(json.loads(sys.stdin.readline()))
    say("joined")
    for line in sys.stdin:
        rank.receive(json.loads(line))
        say("received")
