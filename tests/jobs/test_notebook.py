"""To a reader of examples/notebook: the notebook runs from the first cell to the last."""

from __future__ import annotations

import shutil

import nbformat
import pytest
from helpers import warm
from helpers.launching import ROOT, job_environment
from nbclient import NotebookClient

pytestmark = pytest.mark.any_mpi

FOLDER = ROOT / "examples" / "notebook"


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_trains_and_shows_a_failure(warm_python, tmp_path, monkeypatch):
    for file in FOLDER.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    for variable, value in job_environment({}).items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(tmp_path / "training.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "saved with outputs"
    # `torchmpi run` and its ranks are forks of a process that has imported torchmpi.
    first = [f"--IPKernelApp.exec_lines=import sys; sys.executable = {warm.executable(warm_python)!r}"]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources=resources, extra_arguments=first).execute()

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    _, collective, _, training, plot, failing = code
    assert "2 ranks, sum [1.0, 1.0, 1.0]" in printed(collective)
    assert printed(training).count("[1.7223, 0.9169,") == 2
    assert any("image/png" in output.get("data", {}) for output in plot.outputs)
    assert "largest difference" in printed(plot)
    assert "rank 1 of 2 failed" in printed(failing) and "image 417 is damaged" in printed(failing)
    assert failing.outputs[-1].ename == "RuntimeError"
