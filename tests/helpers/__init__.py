"""What several test files use; ``tests`` is on the path of pytest (setup.cfg)."""
