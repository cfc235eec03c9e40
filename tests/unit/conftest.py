"""Settings of Hypothesis: no deadline, since a busy machine must not make an example fail."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
