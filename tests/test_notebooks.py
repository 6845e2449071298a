"""The notebooks of docs/notebooks: shortened, every cell runs; executed whole, they find what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient
from test_docs import ROOT

FOLDER = ROOT / "docs" / "notebooks"
SAID = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
RESULT = "import json; print(json.dumps([(case.label, case.direction, case.metrics) for case in result.cases]))"


def found_by(name: str, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Execute a notebook in a folder, in a process of its own; return the metrics of its cases by case and direction."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(RESULT))
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    (output,) = notebook.cells[-1].outputs
    return {(case, direction): metrics for case, direction, metrics in json.loads(output["text"])}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_kept_without_outputs(name: str) -> None:
    """Outputs would hold images, times and folders of whoever ran it last."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert f"(notebooks/{name}.ipynb)" in SAID


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with one step or epoch for each training."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(re.sub(r"\b(epochs|steps)=\d+", r"\1=1", cell.source), name, "exec"), names)  # noqa: S102 - our own
    plt.close("all")
    assert {"old/old", "new/old", "independent/old"} <= {case.label for case in names["result"].cases}


@pytest.mark.nightly
def test_photos(tmp_path: Path) -> None:
    """A map lets a better model find more in the index of a weak one, where it found nothing before."""
    cases = found_by("photos", tmp_path)
    found = {case: metrics["cmc@5"] for (case, _), metrics in cases.items()}
    assert found["independent/old"] < 0.3 < found["old/old"] + 0.1 < found["new/old"] < found["new/new"]


@pytest.mark.nightly
def test_image_text(tmp_path: Path) -> None:
    """φ, which saw no image, brings images as well as texts into the old space."""
    cases = found_by("image_text", tmp_path)
    for direction in ("image-to-text", "text-to-image"):
        found = {case: metrics["recall@10"] for (case, way), metrics in cases.items() if way == direction}
        assert found["independent/old"] < 0.3, "of 100 items, chance is a tenth"
        assert found["phi/old"] > 0.8 and found["new/old"] > 0.8
    assert set(found) == {"old/old", "independent/old", "phi/old", "rotation/old", "new/old", "independent/independent"}
