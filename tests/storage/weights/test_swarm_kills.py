"""Hosts of a swarm are killed at random moments of a transfer."""

import pytest

from benchmarks.swarm import kill_at_random, serving

pytestmark = [pytest.mark.nats, pytest.mark.slow]


@pytest.mark.timeout(300)
async def test_weights_arrive_everywhere_though_eight_hosts_are_killed_on_the_way():
    async with serving() as (bus, store):
        copies = await kill_at_random(bus, store, receivers=4, size_bytes=64 << 20, kills=8, longest_s=1.0)
    assert 1 <= copies <= 8, "a place begins anew after each kill, and takes what others have from them"
