"""``torchmpi doctor``: :mod:`.command` gathers facts, runs the checks of the other modules, and reports."""
