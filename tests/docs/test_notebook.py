"""The example notebook does what it says, with runs of its own."""

import asyncio
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import launch

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def said(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell of code printed, and `image/png` for a picture, without what it logged on stderr."""
    return [
        "".join(
            output.get("text", "image/png" * ("image/png" in output.get("data", ())))
            for output in outputs
            if output.get("name") != "stderr"
        )
        for outputs in (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    ]


def assert_as_described(outputs: list[str]) -> None:
    _, steps, trajectory, result, curves, own = outputs
    assert re.fullmatch(r"(step [1-5]: reward 0\.\d+, staleness \d\.\d\n){5}", steps)
    assert "sort" in trajectory
    assert re.fullmatch(r"done after \d+ steps: held-out reward 0\.9\d\n", result)
    assert curves == "image/png"
    assert re.fullmatch(r"(step [1-4]: reward 0\.\d+\n){4}", own)


def test_the_notebook_is_kept_with_the_output_of_a_run():
    assert_as_described(said(nbformat.read(NOTEBOOK, as_version=4)))


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(900)
async def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=None, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    try:
        await client.async_execute()
    finally:
        for run in (tmp_path / "runs").iterdir():
            if (run / "lock").exists():
                await asyncio.to_thread(launch.attach(run.name, directory=tmp_path / "runs").stop)
    assert_as_described(said(notebook))
