"""Makes the helpers of this folder and of tests/fixtures importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))
sys.path.insert(0, str(Path(__file__).parent))
