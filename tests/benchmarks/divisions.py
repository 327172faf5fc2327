"""Tells what whole runs reach on the GPUs of a host, divided between learner and engines in several ways,
beside what `launch plan` says of each.

    python -m benchmarks.divisions --shapes qwen3-4b,qwen3-8b,qwen3-32b,qwen3-30b-a3b --directory DIR

A division `4t2p1e1-2x2` has a learner of 4 ranks, of which 2 share layers (tensor), 1 the depth (pipeline)
and 1 the experts, and 2 engines of 2 GPUs; in `4t2p1e1+2x2` these are the first GPUs of the learner, of which
servers have `mem_fraction_static` 0.3 unless settings say otherwise. Without `--divisions` they are the one
that `launch plan` expects to be the fastest and two others. Each row of the table is a run of a shape: it
trains, is ended and started again, loses a rank of its learner, a server, and all of its processes, and its
newest checkpoint becomes a Hugging Face directory. Rows are lines of DIR/divisions.jsonl, and those that are
there are not measured again. Without CUDA engines are embedded, and plans are those of H200s.

    python -m benchmarks.divisions --shapes sums --divisions 4t1p1e1-4x1 --directory DIR

`sums` is a published model, SmolLM2-135M-Instruct, that learns by `--recipe sums` until its target: its row
tells after how many seconds and steps, of which division is given.
"""

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import structlog
import torch

from benchmarks.model_shapes import SHAPES
from benchmarks.overlap_record import Heard, Turn
from benchmarks.overlap_report import figures
from benchmarks.overlap_settings import defaults, make
from benchmarks.random_models import shape
from bus.errors import ConfigError, SluiceError
from bus.process.child_process import module_command
from launch.plan.plan import Plan, Question, plan
from launch.process.log_settings import configure_logging
from launch.recipes.recipe import recipe
from launch.run_view.run_files import RunFiles
from launch.settings.run_config import Layer, RunConfig, config_file, resolve
from learner.metrics.gpus import GPUS, own_gpu
from soak.local_run import LocalRun
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, append_records, number, read_records

log = structlog.get_logger()
NAME = re.compile(r"(\d+)t(\d+)p(\d+)e(\d+)([-+])(\d+)x(\d+)")
SHARED = (1, 2, 4, 8)
"""Numbers of GPUs that may share a model."""
PROMPT_TOKENS, SAVE_EVERY = 256, 5
ROWS = "divisions.jsonl"
LEARNS = "sums"
"""Name in place of a shape: that of the recipe whose model learns."""
START_S = 1800.0
"""Longest time until a step is trained after a start, or after a part was killed."""
GIB = 1 << 30
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Cell:
    """A run: a shape, and the GPUs of each side."""

    shape: str
    ranks: int
    tensor: int
    pipeline: int
    expert: int
    engines: int
    engine_gpus: int
    shares: bool = False
    """Whether the engines are on GPUs of the learner."""

    @classmethod
    def named(cls, shape_name: str, division: str) -> "Cell":
        """Return the cell of a division by its name. Raises `ConfigError` for what is none."""
        if (found := NAME.fullmatch(division)) is None:
            raise ConfigError(f"--divisions {division}: write a division as 4t2p1e1-2x2 (see --help)")
        ranks, tensor, pipeline, expert, engines, each = map(int, found.group(1, 2, 3, 4, 6, 7))
        return cls(shape_name, ranks, tensor, pipeline, expert, engines, each, found[5] == "+")

    @property
    def division(self) -> str:
        """Return the name of its division."""
        ranks = f"{self.ranks}t{self.tensor}p{self.pipeline}e{self.expert}"
        return f"{ranks}{'+' if self.shares else '-'}{self.engines}x{self.engine_gpus}"

    @property
    def name(self) -> str:
        """Return a name that is also that of the run."""
        return f"{self.shape}-{self.division}".replace(".", "_").replace("+", "_")

    @property
    def gpus(self) -> int:
        """Return how many both sides have."""
        return max(self.ranks, self.first_of_engines + self.engines * self.engine_gpus)

    @property
    def first_of_engines(self) -> int:
        """Return the number of the engines' first GPU."""
        return 0 if self.shares else self.ranks


def settings(cell: Cell, directory: Path, *given: Layer) -> RunConfig:
    """Return the settings of a run, with those that are given over them. Raises `ConfigError` for a division
    that they do not have."""
    learns = cell.shape == LEARNS
    engine: dict[str, Any] = {"type": "embedded"}
    visible: dict[str, Any] = {}
    if torch.cuda.is_available():
        engine = {"type": "sglang", "server": {"tp_size": cell.engine_gpus}}
        engine["server"] |= {"mem_fraction_static": 0.3} if cell.shares else {}
        last = cell.first_of_engines + cell.engines * cell.engine_gpus
        sides = {"learner": range(cell.ranks), "actors": range(cell.first_of_engines, last)}
        visible = {side: {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} for side, gpus in sides.items()}
    own: dict[str, Any] = {
        "run": cell.name,
        "learner": {
            "world": {"processes": cell.ranks},
            "parallel": {
                "tensor": cell.tensor, "pipeline": cell.pipeline, "expert": cell.expert,
                "sequence": cell.tensor > 1, "recompute": "none" if learns else "full",
            },
        },
        "actors": {"engine": engine, "fleet": {"engines": cell.engines}},
        "supervision": {"environment": visible},
    }  # fmt: skip
    if learns:
        below = {"directory": directory / LEARNS, "actors": {"engine": {"type": "embedded"}}}
        return resolve(below, recipe(LEARNS).settings, own, *given)
    own["learner"] |= {
        "optimizer": {"state_dtype": "bfloat16" if torch.cuda.is_available() else "float32"},
        "checkpoint": {"save_every": SAVE_EVERY, "keep": 1},
    }
    return resolve(defaults(cell.shape, directory / cell.shape, devices={}), own, *given)


def planned(cell: Cell, directory: Path, *given: Layer) -> Plan:
    """Return what `launch plan` says of a run. Raises `ConfigError` for one that it refuses."""
    config: Any = settings(cell, directory, *given)
    answer = config.actors.environment.lengths.median
    asked = Question(own_gpu() or GPUS["h200"], cell.gpus, PROMPT_TOKENS, int(answer))
    return plan(config, shape(cell.shape), asked, instead=False)


def advised(shape_name: str, gpus: int, directory: Path, count: int = 3) -> list[Cell]:
    """Return the division that is expected to be the fastest, and the next ones whose learner is divided in
    another way."""
    found: list[tuple[float, Cell]] = []
    experts = SHARED if "num_experts" in SHAPES[shape_name] else (1,)
    for ranks, tensor, pipeline, expert, each in product(SHARED, SHARED, SHARED, experts, SHARED):
        if ranks >= gpus or (gpus - ranks) % each or ranks % (tensor * pipeline) or ranks % expert:
            continue
        cell = Cell(shape_name, ranks, tensor, pipeline, expert, (gpus - ranks) // each, each)
        with suppress(ConfigError):
            said = planned(cell, directory)
            if said.fits and (said.generation_s or not torch.cuda.is_available()):
                found.append((max(said.step_s, said.generation_s or 0.0), cell))
    chosen: dict[tuple[int, ...], Cell] = {}
    for _, cell in sorted(found, key=lambda one: one[0]):
        chosen.setdefault((cell.tensor, cell.pipeline, cell.expert), cell)
    return [*chosen.values()][:count]


class MeasuredRun:
    """A run that trains, and what it has written."""

    def __init__(self, cell: Cell, directory: Path, *layers: Layer) -> None:
        self.config = settings(cell, directory, *layers)
        self._cell = cell
        self._run = RunDirectory(self.config.directory, self.config.run)
        if cell.shape == LEARNS:
            recipe(LEARNS).prepare()
        else:
            make(self.config, cell.shape, prompt_tokens=PROMPT_TOKENS)
        shutil.rmtree(self._run.path, ignore_errors=True)  # of a call that was interrupted
        given = self.config.directory / f"{self.config.run}.json"
        write_json(given, json.loads(self.config.model_dump_json(exclude={"bus"})))
        self._local = LocalRun(self._run, ("--config", str(given)), log_name=f"{self.config.run}.log")

    async def measure(self, steps: int) -> Figures:
        """Return all figures; the run is killed in the end. Raises `SluiceError` for one that ends by itself
        or does not train."""
        settled = 2 * (self.config.admission.max_staleness + 1)
        turn = Turn("async", settled, settled + steps)
        try:
            found: Figures = {"start_s": await self._trained_after("start")}
            await self._until(lambda: _has_read(Heard.of(self._run), turn.last), f"step {turn.last}")
            found |= await asyncio.to_thread(self._figures, turn)
            found |= await asyncio.to_thread(self._memory)
            for change in ("resume", "rank_killed", "server_killed", "host_killed"):
                log.info("measured", run=self.config.run, **found)
                found[f"{change}_s"] = await self._trained_after(change)
            await self._local.kill(patience_s=0)
            return found | {"export_s": await asyncio.to_thread(self._export)}
        finally:
            await self._local.kill(patience_s=0)

    async def learn(self) -> Figures:
        """Return when and where a run ended that learns. Raises `SluiceError` for one that fails."""
        began = time.time()
        try:
            found: Figures = {"start_s": await self._trained_after("start")}
            process = self._local.process
            assert process is not None
            async with asyncio.timeout(START_S):
                if status := await process.wait():
                    raise SluiceError(f"the run ended with status {status}: see {self._local.log}")
        finally:
            await self._local.kill(patience_s=0)
        rows = [row for row in read_records(self._run.metrics) if row.get("train/stage") == "rl"]
        ended = number(rows[-1], "time_s")
        return found | {
            "learnt_s": ended - began,
            "steps": float(len(rows)),
            "held_out": RunFiles(self._run.path).accuracy,
            "step_s": (ended - number(rows[0], "time_s")) / max(1, len(rows) - 1),
        }  # fmt: skip

    def _figures(self, turn: Turn) -> Figures:
        heard = Heard.of(self._run)
        said: Any = figures(self.config, self._run, heard, [turn])["modes"]
        found, gpus = said["async"], self._cell.gpus
        rows = [heard.steps[step] for step in turn.steps]

        def read(name: str) -> float | None:
            return _mean(number(one, name) for one in heard.readings if name in one)

        names = "step_s", "learner_idle", "engine_idle", "slots_idle", "staleness_mean"
        return {name: found[name] for name in names} | {
            "trained_tokens_per_s_per_gpu": found["trained_tokens_per_s"] / gpus,
            "generated_tokens_per_s_per_gpu": found["generated_tokens_per_s"] / gpus,
            "mfu": _mean(number(row, "train/mfu") for row in rows if "train/mfu" in row),
            "stall_s": found["publish_stall_s_per_step"],
            "pause_s": read("engine/pause_s"),
            "announced_to_served_s": read("engine/receive_s"),
            "checkpoint_s": _mean(filter(None, (number(row, "time/checkpoint_s") for row in rows))),
        }  # fmt: skip

    def _memory(self) -> Figures:
        """Return what is used of each GPU, by the largest process of each part, and by all together."""
        found: Figures = {}
        if torch.cuda.is_available():
            asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
            used = said.stdout.split()[: self._cell.gpus]
            found = {f"gpu_{number}_gib": int(mib) / 1024 for number, mib in enumerate(used)}
        for part in ("learner", "actors", "storage"):
            found[f"{part}_gib"] = max(map(_rss_gib, self._local.find(part)), default=None)
        return found | {"host_gib": sum(map(_rss_gib, self._processes()))}

    def _export(self) -> float:
        """Return the seconds until the newest checkpoint is a Hugging Face directory. Raises `SluiceError`
        where it does not become one."""
        began, target = time.time(), self.config.directory / "exported"
        command = module_command("launch", "convert", "megatron-to-hf", str(self._run.path), str(target))
        said = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        if said.returncode:
            raise SluiceError(f"the newest checkpoint became no directory: {said.stderr[-2000:]}")
        shutil.rmtree(target)
        return time.time() - began

    def _processes(self) -> list[psutil.Process]:
        process = self._local.process
        return psutil.Process(process.pid).children(recursive=True) if process is not None else []

    async def _change(self, kind: str) -> None:
        """Start the run, end it and start it again, or kill a rank of the learner, a server (embedded engines
        with their actor), or all processes, and start these again as whoever supervises the host would."""
        if kind == "resume":
            await self._local.end()
        elif kind == "host_killed":
            await self._local.kill(patience_s=0)
        if not kind.startswith(("rank", "server")):
            await self._local.start()
            return
        found = [*self._local.find("learner")][-1:]
        if kind == "server_killed":
            found = [*filter(_is_server, self._processes()), *self._local.find("actors")]
        if not found:
            raise SluiceError(f"{kind}: there is none: see {self._local.log}")
        found[0].kill()

    async def _trained_after(self, change: str) -> float:
        """Return the seconds from the beginning of a change until a step is trained that began behind it, or
        that must have answers of the server after one that is killed."""
        began, wanted = time.time(), 1
        if change == "server_killed":
            wanted += self.config.admission.max_staleness + 1
        await self._change(change)
        changed = time.time()

        def has_trained() -> bool:
            steps = [row for row in read_records(self._run.metrics) if row.get("train/stage") == "rl"]
            latest = steps[-wanted:]
            return len(latest) == wanted and all(began_s(row) > changed for row in latest)

        await self._until(has_trained, f"{wanted} steps")
        return time.time() - began

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not await asyncio.to_thread(holds):
            self._local.raise_if_ended()
            if time.monotonic() > deadline:
                raise SluiceError(f"waited {START_S:g} s for {what}: see {self._local.log}")
            await asyncio.sleep(0.2)


def _has_read(heard: Heard, step: int) -> bool:
    return heard.step >= step and heard.has_read_after(step)


def began_s(row: Record) -> float:
    """Return when a step began, in seconds since the epoch."""
    return number(row, "time_s") - number(row, "time/step_s")


def _mean(values: Iterable[float]) -> float | None:
    found = [*values]
    return mean(found) if found else None


def _is_server(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # others end meanwhile
        return "launcher.py" in " ".join(process.cmdline()[:3])
    return False


def _rss_gib(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        return float(process.memory_info().rss) / GIB
    return 0.0


def predicted(cell: Cell, directory: Path, *given: Layer) -> Figures:
    """Return what `launch plan` says of the figures that it knows."""
    said = planned(cell, directory, *given)
    step_s = max(said.step_s, said.generation_s or 0.0)
    return {
        "trained_tokens_per_s_per_gpu": said.step_tokens / step_s / cell.gpus, "step_s": step_s,
        "mfu": said.mfu, "learner_idle": 1 - said.step_s / step_s, "rank_gib": said.rank.total / GIB,
        "learner_host_gib": said.learner_host / GIB, "checkpoint_gb": said.checkpoint / 1e9,
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as Markdown, with what was planned in brackets."""
    names = dict.fromkeys(name for row in rows for name in (*row["measured"], *row["planned"]))
    lines = [["shape", "division", "device", *names], ["---"] * (len(names) + 3)]
    for row in rows:
        told = [_told(row["measured"].get(name), row["planned"].get(name)) for name in names]
        lines.append([row["shape"], row["division"], row["device"], *told])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _told(found: float | None, expected: float | None) -> str:
    told = "" if found is None else f"{found:.3g}"
    return told if expected is None else f"{told} ({expected:.3g})"


def main() -> None:
    """Measure the cells that have no row, and print the table of all rows."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2, help="of this host")
    shapes = ", ".join((*SHAPES, LEARNS))
    parser.add_argument("--shapes", default="qwen3-8b", help=f"with commas: {shapes}")
    parser.add_argument("--divisions", default="", help="with commas")
    parser.add_argument("--config", type=Path, nargs="*", default=[], help="files of settings for all runs")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run that count")
    given = parser.parse_args()
    configure_logging("info")
    given.directory.mkdir(parents=True, exist_ok=True)
    path, layers, failed = given.directory / ROWS, [*map(config_file, given.config)], 0
    cells: list[Cell] = []
    for name in given.shapes.split(","):
        named = [Cell.named(name, one) for one in given.divisions.split(",") if one]
        if name == LEARNS and not named:
            parser.error(f"--shapes {LEARNS}: give --divisions, since no plan is made of what learns")
        cells += named or advised(name, given.gpus, given.directory)
    for cell in cells:
        row: Record = {"shape": cell.shape, "division": cell.division, "steps": given.steps}
        row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        if any(row.items() <= found.items() for found in read_records(path)):
            continue
        try:
            run = MeasuredRun(cell, given.directory, *layers)
            learns = cell.shape == LEARNS
            row["measured"] = dict(asyncio.run(run.learn() if learns else run.measure(given.steps)))
        except SluiceError as error:
            failed += 1
            log.error("cell_failed", cell=cell.name, reason=str(error))
        else:
            expected = {} if learns else predicted(cell, given.directory, *layers)
            append_records(path, [row | {"planned": dict(expected)}])
    print(table(list(read_records(path))))  # noqa: T201 - the user's terminal
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
