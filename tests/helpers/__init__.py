"""What tests of several folders use; ``tests`` is on the path of pytest (setup.cfg)."""
