"""To whoever installs torchmpi: packaging/ and setup.cfg state the same versions."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from torchmpi import _version
from torchmpi.cli.facts import OLDEST_AND_TESTED
from torchmpi.distributed import torch_names

ROOT = Path(__file__).resolve().parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def requirements() -> dict[str, str]:
    lines = [*CONFIG["options"]["install_requires"].split(), f"python{CONFIG['options']['python_requires']}"]
    return dict(line.split(">=") for line in lines)


def test_the_recipe_for_conda_has_the_same_requirements():
    recipe = (ROOT / "packaging/conda/meta.yaml").read_text()
    run = re.search(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    assert run is not None
    found = dict(re.findall(r"- (\S+) >=(\S+)", run[1]))
    found["torch"] = found.pop("pytorch")
    assert found == requirements()
    assert f'set version = "{_version.__version__}"' in recipe


def test_the_doctor_knows_the_oldest_versions():
    oldest = {name.lower(): oldest for name, (oldest, _) in OLDEST_AND_TESTED.items()}
    assert oldest == requirements()


def test_classifiers_name_the_versions_of_python():
    oldest, newest = (int(version.split(".")[1]) for version in OLDEST_AND_TESTED["Python"])
    named = re.findall(r"Python :: 3\.(\d+)", CONFIG["metadata"]["classifiers"])
    assert [int(minor) for minor in named] == list(range(oldest, newest + 1))


def test_the_newest_torch_that_was_run_is_the_same_everywhere():
    assert torch_names.TESTED[-1] == OLDEST_AND_TESTED["torch"][1]
