"""The example notebook does what it says, with a run of its own."""

import asyncio
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import launch

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_the_notebook_is_kept_without_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count] == []


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(400)
async def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    try:
        await client.async_execute()
    finally:
        if (tmp_path / "runs/notebook/lock").exists():
            await asyncio.to_thread(launch.attach("notebook", directory=tmp_path / "runs").stop)
    said = ["".join(o.get("text", "") for o in cell.get("outputs", ())) for cell in notebook.cells]
    assert "step 1: reward" in said[3]
    assert "step 2: reward" in said[3]
    assert "sort" in said[5]
    assert said[7] == "done after 4 steps, 64 trajectories trained\n"
    assert said[9].startswith("done [0.")
