"""Adapters that a stand-in of an SGLang server has."""

import asyncio

import torch

from tests.actors.adapters import MODULES, RANK
from tests.actors.sglang_stand_in import TIMEOUT_S
from tests.actors.tiny import request

BLOCK = "model.layers.0.self_attn"
ROWS = {"q": 8, "k": 4, "v": 4}
BASE = {f"{BLOCK}.{name}_proj.weight": torch.ones(rows, 6) for name, rows in ROWS.items()}
A, B = (f"base_model.model.{BLOCK}.q_proj.lora_{which}.weight" for which in "AB")
LORA = {
    "enable_lora": True,
    "max_lora_rank": RANK,
    "lora_target_modules": [*MODULES],
    "max_loras_per_batch": 3,
    "max_loaded_loras": 4,
}


def adapter(value: float) -> dict[str, torch.Tensor]:
    return {A: torch.full((RANK, 6), value), B: torch.full((8, RANK), value)}


async def asked(server, count):
    async with asyncio.timeout(TIMEOUT_S):
        while len([body for body in server.asked if body.get("lora_path")]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def begun(engine, name):
    return asyncio.create_task(engine.generate(request(name, [1], new=4)))
