"""Run the distributed tests of models that come with Transformers, on CPUs, over gloo and over torchmpi.

    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xf transformers-5.23.0.tar.gz
    pip install parameterized
    python scripts/test_transformers.py transformers-5.23.0 [--only WORD] [--write]

The sources contain these tests as classes that the test of each model inherits, but neither the tests of models nor the
module that starts ranks. tests/jobs/frameworks/transformers_suite has two small models, and a module that starts ranks
by torch.multiprocessing and asks for gloo; with TORCHMPI_AS_GLOO=1 their process groups are of torchmpi. Prints a table
and the reasons of skips; --write puts them into results/frameworks.md. Ends with status 1 if a test fails with torchmpi
and not with gloo.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from test_accelerate import CHECKOUT, compare

SUITE = CHECKOUT / "tests" / "jobs" / "frameworks" / "transformers_suite"
CLASSES = ("test_tensor_parallel_mixin.py", "test_expert_parallel_mixin.py", "test_fsdp_mixin.py")
"""Files of the folder tests of the sources."""
GROUPS = {
    "Qwen3, tensor parallel": "Qwen3Test and test_tp_",
    "Qwen3, FSDP2": "Qwen3Test and (fsdp or hsdp)",
    "Qwen3 with experts, tensor parallel": "Qwen3MoeTest and test_tp_",
    "Qwen3 with experts, expert parallel": "Qwen3MoeTest and test_ep_",
    "Qwen3 with experts, FSDP2": "Qwen3MoeTest and (fsdp or hsdp)",
}
"""Titles, and expressions that select tests."""


def main() -> int:
    """Run the chosen tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with the sources of Transformers")
    parser.add_argument("--only", default="", metavar="WORD", help="groups of tests with this word in their title")
    parser.add_argument("--write", action="store_true", help="write the lines into results/frameworks.md")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        tests = shutil.copytree(SUITE, Path(folder) / "tests")
        (tests / "__init__.py").touch()
        for name in CLASSES:
            shutil.copy(options.checkout / "tests" / name, tests)
        for title, expression in GROUPS.items():
            if options.only not in title:
                continue
            section = "tests of Transformers" if options.write else ""
            failed |= compare(title, tests / "small_models.py", section, "-k", expression)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
