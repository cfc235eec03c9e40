"""A machine that is busy with something else for a moment is no reason for an example to fail."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
