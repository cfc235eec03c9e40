"""Reductions on the GPU, without one: under Numba's simulator, bit for bit against the kernels of the host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchmpi.backends.ipc import cuda_driver, cuda_reduction
from torchmpi.errors import BackendUnavailableError
from torchmpi.shared_memory.kernels import reduction
from torchmpi.tensors import dtypes

_PROGRAM = Path(__file__).with_name("cuda_simulated.py")


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """What is wrong, by dtype. A process of its own: Numba looks at the variable when it is imported."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, _PROGRAM], env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("dtype", reduction.LANES, ids=dtypes.short_name)
def test_simulated_kernels_have_the_bits_of_those_of_the_host(found, dtype):
    assert not found[dtypes.short_name(dtype)]


KEYS = sorted({reduction.function_key(dtype, op) for dtype in reduction.LANES for op in dtypes.info(dtype).ops})


@pytest.mark.parametrize("lane", sorted({lane for lane, _, _ in KEYS}))
def test_kernels_compile_to_wide_loads_and_fuse_nothing(lane):
    try:
        cuda_reduction.ptx(("f32", "sum", 1), 2, (9, 0))
    except BackendUnavailableError as error:
        pytest.skip(f"no toolkit of CUDA that Numba can compile with: {str(error)[:200]}")
    for key in KEYS:
        if key[0] == lane:
            code = cuda_reduction.ptx(key, 4, (9, 0))
            assert len(re.findall(r"ld\.global\.v2\.u64", code)) % 4 == 0
            assert "fma" not in code, key  # rounds once where the host rounds twice
            assert ".local" not in code and "call" not in code, key
            assert len(re.findall(r"\.param \.u64", code)) == 4 + 2


def test_without_a_driver_the_refusal_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(cuda_driver.CudaError, match="CUDA driver"):
        cuda_driver.library()
