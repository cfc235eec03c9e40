"""``torchmpi doctor``: :mod:`.diagnosis` gathers facts, runs the checks of the other modules, and reports."""
