"""The tiny checkpoints of the tests, for benchmarks of models whose weights nobody has here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tests.checkpoints.families import make_checkpoint

__all__ = ["make_checkpoint"]
