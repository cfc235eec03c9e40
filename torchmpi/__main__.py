"""``python -m torchmpi`` is the same as ``torchmpi``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main(program="python -m torchmpi"))
