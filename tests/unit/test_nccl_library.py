"""The ctypes side of NCCL, against the library itself as far as it answers without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchmpi.backends.nccl import nccl_library as nccl
from torchmpi.errors import TransportError


@pytest.fixture(scope="module")
def library() -> nccl.Library:
    try:
        return nccl.load()
    except TransportError as error:
        pytest.skip(str(error))


def header(library: nccl.Library) -> str:
    """The nccl.h of this very library, where NVIDIA's wheel has put it."""
    path = Path(library.path).parents[1] / "include" / "nccl.h"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    return path.read_text()


def test_it_says_which_version_it_is(library):
    assert library.version >= (2, 10, 0) and all(part < 100 for part in library.version)
    if torch.cuda.is_available():
        assert library.version == torch.cuda.nccl.version()


def test_the_signatures_are_those_of_the_header(library):
    text = re.sub(r"/\*.*?\*/", "", header(library), flags=re.S)
    kinds = {"int": ctypes.c_int, "size_t": ctypes.c_size_t, "ncclUniqueId": nccl.UniqueId}
    kinds |= dict.fromkeys(("ncclDataType_t", "ncclRedOp_t"), ctypes.c_int)
    for name, arguments in nccl.FUNCTIONS.items():
        (declared,) = re.findall(rf"ncclResult_t\s+{name}\((.*?)\);", text, flags=re.S)
        parts = [part.strip().removeprefix("const ") for part in declared.split(",") if part.strip()]
        assert len(parts) == len(arguments), name
        for part, used in zip(parts, arguments, strict=True):
            if "*" in part or part.startswith(("ncclComm_t", "cudaStream_t")):
                assert used is ctypes.c_void_p or hasattr(used, "contents"), (name, part)
            else:
                assert used is kinds[part.split()[0]], (name, part)


def test_the_numbers_are_those_of_the_header(library):
    text = header(library)
    names = {
        torch.int8: "Int8", torch.uint8: "Uint8", torch.int32: "Int32", torch.uint32: "Uint32", torch.int64: "Int64",
        torch.uint64: "Uint64", torch.float16: "Float16", torch.float32: "Float32", torch.float64: "Float64",
        torch.bfloat16: "Bfloat16",
    }  # fmt: skip
    assert names.keys() == nccl.DTYPES.keys()
    expected = {f"nccl{names[dtype]}": number for dtype, number in nccl.DTYPES.items()}
    expected |= {f"nccl{op.capitalize()}": number for op, number in nccl.OPS.items()}
    for name, number in expected.items():
        assert re.search(rf"\b{name}\s*=\s*{number}\b", text), name
    assert ctypes.sizeof(nccl.UniqueId) == int(re.search(r"NCCL_UNIQUE_ID_BYTES (\d+)", text)[1])


def test_an_error_has_its_own_words_and_the_remedy(library):
    text = library.describe("ncclAllReduce", 5)
    assert "ncclAllReduce: invalid usage" in text and "backend='ipc'" in text and "NCCL 2." in text
    with pytest.raises(TransportError, match=r"ncclCommGetAsyncError: invalid argument.*NULL"):
        library.call("ncclCommGetAsyncError", None, ctypes.byref(ctypes.c_int()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_a_communicator_is_refused_with_the_reason_of_cuda(library):
    with pytest.raises(TransportError, match=r"(?i)^rank 7: NCCL .*ncclCommInitRank: .*cuda.*nvidia-smi"):
        nccl.Communicator(library, library.unique_id(), 1, 0, where="rank 7")


def test_a_group_is_closed_when_a_call_in_it_fails(library):
    with pytest.raises(KeyError), library.group():
        raise KeyError
    with pytest.raises(TransportError, match=r"ncclGroupEnd: invalid usage"):
        library.call("ncclGroupEnd")


LISTENING = """
import os, sys
from pathlib import Path
from torchmpi.backends.nccl import nccl_library
if sys.argv[1] == "alone":
    nccl_library.stay_on_this_host()
one, other = nccl_library.load().unique_id(), nccl_library.load().unique_id()
assert one != other and len(one) == 128
sockets = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
for kind in ("tcp", "tcp6"):
    for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            print(words[1].split(":")[0])
"""


def listening(where: str, **environment: str) -> set[str]:
    """The addresses at which a process listens that has made ids, as the kernel writes them."""
    variables = {name: value for name, value in os.environ.items() if name != "NCCL_SOCKET_IFNAME"} | environment
    command = [sys.executable, "-c", LISTENING, where]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_job_on_one_host_listens_on_the_loopback_only(library):
    loopback = {"0100007F", "00000000000000000000000001000000"}
    found = listening("alone")
    assert found and found <= loopback
    others = [name for name in os.listdir("/sys/class/net") if not name.startswith("lo")]
    up = [name for name in others if Path(f"/sys/class/net/{name}/operstate").read_text().strip() == "up"]
    if up:  # what the user says goes before
        assert not listening("alone", NCCL_SOCKET_IFNAME=f"={up[0]}") & loopback


def test_where_it_is_looked_for(tmp_path, monkeypatch):
    file = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    file.parent.mkdir(parents=True)
    file.write_text("not a library")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = nccl.candidates()
    assert str(file) in found and found[-1] == "libnccl.so.2"


def test_where_there_is_none_the_way_to_it_is_told(monkeypatch):
    monkeypatch.setattr(nccl, "candidates", lambda: ["/nowhere/libnccl.so.2"])
    nccl.load.cache_clear()
    try:
        with pytest.raises(TransportError, match=r"/nowhere/libnccl.so.2.*pip install"):
            nccl.load()
    finally:
        nccl.load.cache_clear()
