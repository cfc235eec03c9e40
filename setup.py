"""Write the commit into sdists and wheels, for `torchmpi --version`. All metadata are in setup.cfg."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

COMMIT: str = runpy.run_path(str(Path(__file__).parent / "torchmpi" / "_version.py"))["commit"]()


def write_commit(root: str) -> None:
    """Write the commit beside the module that reads it."""
    if COMMIT:
        Path(root, "torchmpi", "_commit.txt").write_text(COMMIT + "\n")


class BuildWithCommit(build_py):
    """Adds the commit to a wheel; an editable installation asks git instead."""

    def run(self) -> None:
        """Copy the modules, then write the commit."""
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SdistWithCommit(sdist):
    """Adds the commit to an sdist, which has no git history."""

    def make_release_tree(self, base_dir: str, files: Any) -> None:
        """Copy the files, then write the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
