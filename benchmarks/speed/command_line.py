"""How long the command line takes to answer `xcompat --help`, and to say what is wrong, against importing PyTorch.

python benchmarks/speed/command_line.py [--rounds 7]
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from measuring import Row, main, medians, timed

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "clip" / "b32_to_l14.yaml")
ANSWERS = {
    "--help": ("evaluate", 0),
    f"train {RECIPE} training.learing_rate=1": ("did you mean 'learning_rate'?", 2),
    f"train {RECIPE} stages.phi.method=xbtt": ("did you mean 'xbt'?", 2),
    "gallery search nowhere shoe --model me/model": ("nowhere is no gallery", 2),
    "export onnx ./nowhere --out onnx": ("the model folder ./nowhere does not exist", 2),
    "map --old nowhere.npy --new new.npy": ("nowhere.npy does not exist", 2),
    "migrate status postgress://db/shop": ("did you mean 'postgres'?", 2),
}
"""What is typed -> what is said, and the exit code."""
IMPORT = [sys.executable, "-c", "import torch"]


def measure(rounds: int = 7) -> list[Row]:
    """Measure fresh processes."""
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    run(IMPORT)
    rows = []
    for typed, (said, code) in ANSWERS.items():
        asked = [sys.executable, "-m", "xcompat", *typed.split()]
        done = run(asked)
        assert said in done.stdout + done.stderr and done.returncode == code, done
        took = medians({"ours": partial(run, asked), "theirs": partial(run, IMPORT)}, rounds)
        name = f"xcompat {typed.replace(RECIPE, 'RECIPE')}"
        rows.append(timed(name, 'python -c "import torch"', "<= 0.5", took["ours"], took["theirs"]))
    return rows


if __name__ == "__main__":
    main(measure)
