"""Tells how long storage takes to read a file of many prompts, and how much memory it needs for them.

`python -m benchmarks.prompt_files` prints it as JSON, for a million prompts in each format. Every
start is a process of its own: the first reads the file, the second finds what the first has stored.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from bus.codec import Json
from bus.process.child_process import module_command
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.prompt_files.dataset import refuse_large
from storage.prompts.data_sets import DataSets
from storage.prompts.run_prompts import read_prompts
from storage.settings.data import DataConfig

PROMPTS = 1_000_000
WORDS = 40
LEASES = 2000
LARGEST_MESSAGE = 1 << 20
AT_ONCE = 10_000
"""Rows of a Parquet file that are written at once, and are a row group."""


def bench_prompt_files(directory: Path, *, prompts: int = PROMPTS) -> dict[str, Json]:
    """Return the figures of two starts with a file of so many prompts, by format."""
    jsonl, parquet = directory / "prompts.jsonl", directory / "prompts.parquet"
    _write(jsonl, parquet, prompts)
    return {file.suffix[1:]: [_started(file, directory) for _ in range(2)] for file in (jsonl, parquet)}


def _write(jsonl: Path, parquet: Path, prompts: int) -> None:
    """Write the same rows in both formats, of about 200 characters each."""
    import pyarrow
    import pyarrow.parquet

    words, rng = ("alpha", "seven", "minus", "times", "apples", "train", "station", "hour"), random.Random(0)
    schema = pyarrow.schema({"prompt": pyarrow.string(), "label": pyarrow.string()})
    with jsonl.open("w") as lines, pyarrow.parquet.ParquetWriter(parquet, schema) as table:
        for first in range(0, prompts, AT_ONCE):
            rows = [
                {"prompt": f"{n} {' '.join(rng.choices(words, k=WORDS))}", "label": str(n % 97)}
                for n in range(first, min(first + AT_ONCE, prompts))
            ]
            lines.writelines(json.dumps(row) + "\n" for row in rows)
            table.write_table(pyarrow.Table.from_pylist(rows, schema))


def _started(file: Path, directory: Path) -> Json:
    command = module_command("benchmarks.prompt_files", str(file), str(directory))
    found: Json = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def _start(file: Path, directory: Path) -> dict[str, Json]:
    """Do what storage does with the prompts of its run before its first leases, and read those of some."""
    began, cpu = time.monotonic(), time.process_time()
    before = _peak_memory_mib()
    run = RunDirectory(directory, file.suffix[1:])
    prompts = read_prompts(DataConfig(prompts=file), run, seed=0)
    refuse_large(prompts.training, prompts.source, largest_message=LARGEST_MESSAGE)
    with closing(Ledger.open(run.ledger)) as ledger:
        data = DataSets(ledger, run.data)
        data.configure(prompts.training, seed=0, shuffle=True, source=prompts.source)
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
        leases = ledger.issue(LEASES, policy_version=0)
        began = time.process_time()
        for lease_id in leases:
            data.prompt(lease_id)
        reading_s = time.process_time() - began
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "prompt_us": reading_s / LEASES * 1e6,
        "memory_before_mib": before,
        "peak_memory_mib": _peak_memory_mib(),
    }


def _peak_memory_mib() -> float:
    """Return the most memory that this process had; `getrusage` would count what its parent had, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main(arguments: list[str]) -> None:
    """Print the figures as JSON; with arguments, be one start."""
    if arguments:
        file, directory = map(Path, arguments)
        sys.stdout.write(json.dumps(_start(file, directory)))
        return
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        sys.stdout.write(json.dumps(bench_prompt_files(Path(scratch)), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
