"""To whoever compiles kernels: our loader of object files runs the code as that of LLVM does."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from torchmpi.nn.kernels import NN
from torchmpi.parameterserver.kernels import SHARDING
from torchmpi.shared_memory.compiler import native_code, object_file
from torchmpi.shared_memory.compiler.llvm import Llvm
from torchmpi.shared_memory.kernels import load, reduction, source_digest
from torchmpi.shared_memory.kernels.kernel_sets import COLLECTIVES

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="LLVM loads files of this processor")

# A constant, a call of the file and one of the process, and functions that others do not see.
CODE = """
@numbers = private constant [3 x i64] [i64 5, i64 7, i64 11]
declare i64 @labs(i64)
define internal i64 @number(i64 %index) noinline {
    %place = getelementptr [3 x i64], [3 x i64]* @numbers, i64 0, i64 %index
    %number = load i64, i64* %place
    ret i64 %number
}
define i64 @distance(i64 %index, i64 %other) {
    %number = call i64 @number(i64 %index)
    %difference = sub i64 %number, %other
    %distance = call i64 @labs(i64 %difference)
    ret i64 %distance
}
define i64 @again(i64 %index, i64 %other) {
    %distance = call i64 @distance(i64 %index, i64 %other)
    ret i64 %distance
}
"""
# A variable: memory that the code writes.
COUNTER = """
@count = internal global i64 40
define i64 @counted() {
    %count = load i64, i64* @count
    %next = add i64 %count, 1
    store i64 %next, i64* @count
    ret i64 %next
}
"""


def called(address: int, *arguments: int) -> int:
    kind = ctypes.c_int64
    return ctypes.CFUNCTYPE(kind, *[kind] * len(arguments))(address)(*arguments)


def test_both_loaders_agree():
    llvm = Llvm()
    image = llvm.object_file(CODE, is_optimized=False)
    functions = object_file.load(image)
    llvm.load(image)
    assert functions is not None and sorted(functions) == ["again", "distance"]
    for name, address in functions.items():
        assert llvm.find(name) not in (0, address)
        for index, number in enumerate((5, 7, 11)):
            assert called(address, index, 9) == called(llvm.find(name), index, 9) == abs(number - 9)


def test_every_kernel_is_loaded_without_llvm(monkeypatch):
    sets = COLLECTIVES, SHARDING, NN
    for which in sets:
        load(which=which)
    reduction.address(torch.float16, "avg")
    monkeypatch.setattr(native_code.Compiler, "llvm", property(lambda self: pytest.fail("loaded LLVM")))
    compiler = native_code.Compiler()
    for kernels in sets:
        names = [f"torchmpi_{kernels.name}_{part}" for part in range(len(kernels.parts))]
        assert all(compiler.load(name, source_digest(kernels.package)) for name in names)
        assert all(compiler.find(f"torchmpi_kernel_{name}") for name in kernels.names)
    assert compiler.function("torchmpi_reduce_f16_sum_1_divide", source_digest(), pytest.fail)


def test_llvm_loads_what_needs_memory_to_write(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    image = Llvm().object_file(COUNTER, is_optimized=False)
    assert object_file.load(image) is None
    compiler = native_code.Compiler()
    compiler._add(image)
    assert [called(compiler.find("counted")) for _ in range(3)] == [41, 42, 43]


@pytest.mark.parametrize(("offset", "value"), [(4, 1), (16, 3), (18, 183)], ids=["32 bits", "library", "aarch64"])
def test_files_of_other_kinds_are_left_to_llvm(offset, value):
    image = bytearray(Llvm().object_file(CODE, is_optimized=False))
    image[offset] = value
    assert object_file.load(bytes(image)) is None


def test_files_with_other_relocations_are_left_to_llvm():
    image = bytearray(Llvm().object_file(CODE, is_optimized=False))
    (table, num_sections), relocations = struct.unpack_from("<40xQ12xH", image), 0
    for index in range(num_sections):
        _, kind, _, _, start, size, *_ = struct.unpack_from("<IIQQQQ", image, table + 64 * index)
        if kind == object_file._RELA and not relocations:
            relocations = size // 24
            image[start + 8] = 10  # R_X86_64_32
    assert relocations and object_file.load(bytes(image)) is None


def test_a_function_that_the_process_does_not_have():
    image = Llvm().object_file(CODE.replace("@labs", "@no_such_function"), is_optimized=False)
    with pytest.raises(RuntimeError, match="this process has no function no_such_function"):
        object_file.load(image)


def test_a_system_without_memory_for_machine_code(monkeypatch):
    image = Llvm().object_file(CODE, is_optimized=False)
    monkeypatch.setattr(object_file.mmap, "PROT_EXEC", 1 << 20)  # which no system knows
    with pytest.raises(OSError, match="does not let this process run machine code"):
        object_file.load(image)


@pytest.mark.slow
def test_a_thread_ends_in_a_kernel_after_the_interpreter():
    program = """
        import ctypes, os, sys, threading, time
        sys.path.insert(0, sys.argv[1])
        from helpers.kernel_rig import compiled
        from torchmpi.shared_memory.compiler.compilation import kernel
        from torchmpi.shared_memory.kernels.intrinsics import sleep

        @kernel
        def wait(microseconds):
            sleep(microseconds)
            return 0

        class Last:
            def __del__(self, usleep=ctypes.CDLL(None).usleep, write=os.write):
                usleep(400_000)
                write(1, b"the end")

        last, wait = Last(), compiled(wait).wait
        threading.Thread(target=wait, args=(200_000,), daemon=True).start()
        time.sleep(0.05)
    """
    job = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (job.returncode, job.stdout, job.stderr) == (0, "the end", "")


def test_another_python_does_not_find_the_compiled_code(monkeypatch):
    """Regression: code for 3.11 calls functions that 3.10 lacks, and was found by it: no shared memory for all."""
    compiler = native_code.compiler()
    name = compiler._file_name("torchmpi_test", "recipe")
    assert compiler._file_name("torchmpi_test", "recipe") == name
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-310")
    assert compiler._file_name("torchmpi_test", "recipe") != name


@pytest.mark.parametrize(
    "arguments, problem",
    [((), "takes 5 arguments"), ((1, 2, 3, 4), "takes 5 arguments"), (("a", 1, 2, 3, 4), "integer")],
)
def test_entries_of_machine_code_check_their_arguments(arguments, problem):
    """Regression: a wrong number of arguments, or text for a number, was a segmentation fault."""
    with pytest.raises(TypeError, match=problem):
        load()["barrier"](*arguments)


def test_a_number_that_is_too_large_for_a_kernel():
    with pytest.raises(OverflowError):
        load()["barrier"](1 << 64, 1, 2, 3, 4)
