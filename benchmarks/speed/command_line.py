"""How long `xcompat --help` takes to answer, against importing PyTorch.

python benchmarks/speed/command_line.py [--rounds 7]
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from measuring import Row, main, medians, timed

HELP = [sys.executable, "-m", "xcompat", "--help"]
IMPORT = [sys.executable, "-c", "import torch"]


def measure(rounds: int = 7) -> list[Row]:
    """Measure fresh processes."""
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    assert "evaluate" in run(HELP).stdout
    run(IMPORT)
    took = medians({"ours": lambda: run(HELP), "theirs": lambda: run(IMPORT)}, rounds)
    return [timed("xcompat --help", 'python -c "import torch"', "<= 0.5", took["ours"], took["theirs"])]


if __name__ == "__main__":
    main(measure)
