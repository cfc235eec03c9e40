"""To whoever starts and stops torchmpi in a process, as this file does: any number of times, without leaks."""

from __future__ import annotations

import os
import pickle
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.leftovers import in_use, left_files

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi import errors
from torchmpi.communicators.conditions import gather_unless_equal
from torchmpi.session import runtime


@pytest.fixture(autouse=True)
def stopped():
    """Stop torchmpi for these tests; the start of the session is restored afterwards."""
    was_running = runtime.is_running()
    mpi.stop()
    yield
    mpi.stop()
    if was_running:
        mpi.start()


def quiet(**settings: object) -> mpi.Config:
    return mpi.Config(**{"verbose": False, "tuning_file": os.environ["TORCHMPI_TUNING_FILE"], **settings})


def test_calls_outside_of_start_and_stop_are_refused(agree):
    for call in (
        mpi.rank,
        mpi.size,
        mpi.device,
        mpi.barrier,
        lambda: mpi.allreduce(1),
        lambda: mpi.push_communicator("a"),
    ):
        agree.raises(errors.NotStartedError, call, "start()")


def test_stop_twice_is_harmless_and_start_may_follow(agree):
    for _ in range(3):
        with mpi.started(config=quiet()):
            started, total = mpi.is_started(), mpi.allreduce(1)
        agree.equal((started, mpi.is_started()), (True, False))
        agree.equal(total, mpi_size())
        mpi.stop()


def test_a_net_whose_communicator_was_closed_is_registered_anew(agree):
    """As after the loss of a rank. Regression: "registered already", when a function of elastic() began again."""
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    for _ in range(2):
        mpi.start(config=quiet())
        mpinn.register_async_backward(net)
        net.zero_grad()
        net(torch.full((1, 2), mpi.rank() + 1.0)).sum().backward()
        mpinn.synchronize_gradients_async(net)
        agree.equal(net.weight.grad[0, 0].item(), (mpi.size() + 1) / 2)
        mpi.stop()


def test_an_error_within_stop_leaves_nothing_to_stop(agree):
    """Regression: the next stop(), also that at exit, waited for the other ranks until the job was ended."""
    mpi.start(config=quiet())
    rank, error = mpi.rank(), None
    if rank == 0:
        runtime.current().resources.callback(os.rmdir, "/nowhere")
    try:
        mpi.stop()
    except OSError as raised:
        error = raised
    agree((error is not None) == (rank == 0) and not mpi.is_started(), repr(error))


def mpi_size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def mpi_rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


def test_start_gathers_objects_of_all_ranks_once(agree):
    """Each gathering takes time and memory on every rank for every rank of the job."""
    from mpi4py import MPI

    pickled: list[str] = []

    def dumps(obj, *protocol):
        pickled.append(type(obj).__name__)
        return pickle.dumps(obj, *protocol)

    MPI.pickle.__init__(dumps, pickle.loads)
    try:
        with mpi.started(config=quiet()):
            # Besides, the first rank of a host broadcasts to it, and communicators of an earlier start are compared.
            names = [name for name in pickled if name not in ("int", "Ticket", "NoneType", "dict")]
            num_hosts = runtime.current().num_hosts
    finally:
        MPI.pickle.__init__()
    # Hosts connect with each other, for which they gather addresses.
    agree.equal(names if num_hosts == 1 else names[:1], ["RankInfo"])


@pytest.mark.min_ranks(2)
def test_values_are_gathered_only_if_they_differ(agree):
    mpi.start(config=quiet())
    comm, size = mpi.communicator().intra.comm, mpi.size()
    shared: dict[str, object] = {}
    all_the_same, different = gather_unless_equal(comm, shared), gather_unless_equal(comm, {"rank": mpi.rank()})
    agree(len(all_the_same) == size and all(each is shared for each in all_the_same), all_the_same)
    agree.equal(different, [{"rank": rank} for rank in range(size)])


@pytest.mark.parametrize("are_hosts", [False, True])
def test_on_several_hosts_mpi_makes_progress_between_calls(agree, are_hosts):
    """Regression: the last bytes of an MPI_Reduce_scatter were sent in the next call of MPI, which waited for them."""
    host_name = f"host{mpi_rank()}" if are_hosts else ""
    with mpi.started(config=quiet(host_name=host_name)):
        probes = [thread for thread in threading.enumerate() if thread.name == "torchmpi MPI progress"]
        agree.equal(len(probes), int(runtime.current().num_hosts > 1))
        agree(all(thread.is_alive() for thread in probes))
    agree(not any(thread.is_alive() for thread in probes))


def test_nothing_is_left_behind(agree):
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()

    def one_run() -> None:
        with mpi.started(config=quiet()):
            mpi.allreduce_async(torch.ones(10)).wait()
            mpi.push_communicator(mpi.rank() % 2)

    one_run()
    before = in_use()
    for _ in range(3):
        one_run()
    agree.equal(in_use(before), before, "after and before")
    agree.equal(left_files(), set(), "left in /dev/shm")
    agree.equal((os.sched_getaffinity(0), torch.get_num_threads()), (cores, threads), "cores and threads")


def test_shared_memory_has_no_name_in_the_file_system(agree):
    with mpi.started(config=quiet()):
        names = [name for name in os.listdir("/dev/shm") if name.startswith("torchmpi-")]
        maps = Path("/proc/self/maps").read_text()
        is_shared = mpi.communicator(0).intra.status_board is not None
        mpi.barrier()
    agree(not names, str(names))
    agree(is_shared == ("torchmpi-group-" in maps))


def test_mpich_has_no_file_that_would_be_left_if_a_rank_were_killed(agree):
    with mpi.started(config=quiet()):
        mpi.barrier()
        maps = Path("/proc/self/maps").read_text()
    paths = {Path(path) for path in re.findall(r"/dev/shm/mpich_shm_\w+", maps)}
    agree(not any(path.exists() for path in paths), str(paths))


def test_custom_levels_come_between_the_world_and_the_hosts(agree):
    with mpi.started(
        config=quiet(), custom_communicator_init=lambda: mpi.push_communicator(mpi.rank() % 2, name="custom")
    ):
        names = [level.name for level in runtime.current().communicators.levels]
        current = mpi.communicator().level
    agree.equal(names[:2], ["world", "custom"])
    agree(names[2].startswith("host"), str(names))
    agree.equal(current, 0)
    with mpi.started(config=quiet(), collective_communicator=lambda: mpi.push_communicator(0, name="own")):
        names = [level.name for level in runtime.current().communicators.levels]
    agree.equal(names, ["world", "own"])


def test_hosts_are_grouped_by_name(agree):
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    with mpi.started(config=quiet(host_name=f"host{rank // 2}")):
        local = mpi.local_rank(), mpi.local_size(), mpi.num_nodes_in_communicator(), mpi.host_name()
        with mpi.use(1):
            host = mpi.size(), mpi.num_nodes_in_communicator()
        checking = mpi.communicator(0).intra.checking
    in_pair = min(2, size - rank // 2 * 2)
    num_hosts = (size + 1) // 2
    agree.equal(local, (rank % 2, in_pair, num_hosts, f"host{rank // 2}"))
    agree.equal(host, (in_pair, 1))
    agree.equal(checking, "strict" if num_hosts > 1 else "board" if size > 1 else "off")


def test_each_local_rank_has_cores_of_its_own_where_they_suffice(agree):
    available = len(os.sched_getaffinity(0))
    with mpi.started(config=quiet()):
        masks = mpi.allgather_object(os.sched_getaffinity(0))
        size = mpi.size()
        threads = torch.get_num_threads()
    if available >= size:
        agree(sum(map(len, masks)) == len(set().union(*masks)), f"shared cores: {masks}")
    agree(1 <= threads <= max(1, available), f"{threads} threads")
    with mpi.started(config=quiet(bind="none")):
        mask = os.sched_getaffinity(0)
    agree.equal(len(mask), available)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket_bytes", (1000, 1001)),
        ("staging_bytes", (1 << 20, 64 << 20)),
        ("gpu_backends", ("nccl", "ipc")),
        ("ipc_groups", (True, False)),
    ],
)
def test_settings_and_arguments_that_differ_between_ranks_are_refused_on_all(agree, name, values):
    from mpi4py import MPI

    mine = {name: values[MPI.COMM_WORLD.rank > 0]}
    options = mine if name == "ipc_groups" else {"config": quiet(**mine)}
    words = f"{name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1"
    agree.raises(errors.ConfigError, lambda: mpi.start(**{"config": quiet(), **options}), words)
    agree(not runtime.is_running())


def test_a_gpu_on_some_ranks_only_is_no_reason_to_wait(agree, monkeypatch):
    """The levels are pushed by all ranks. The GPU is one in name; no tensor is placed on it."""
    from mpi4py import MPI

    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    has_gpu = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
    if has_gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    with mpi.started(config=quiet()):
        names = [level.name for level in runtime.current().communicators.levels]
        with mpi.use(2):
            together = mpi.size()
        device, summary = mpi.device().type, runtime.current().summary()
        total = mpi.allreduce(1)
    agree.equal([name.split()[0] for name in names], ["world", "host", "ipc"])
    agree.equal((device, together), ("cuda", 1) if has_gpu else ("cpu", MPI.COMM_WORLD.size - 1))
    agree.equal(total, MPI.COMM_WORLD.size)
    agree("GPU backend nccl (TORCHMPI_GPU_BACKENDS=none: off)" in summary, summary)


def test_cuda_is_refused_where_there_is_none(agree):
    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    agree.raises(errors.DeviceError, lambda: mpi.start(with_cuda=True), "with_cuda")


def test_properties_of_this_rank(agree):
    from mpi4py import MPI

    with mpi.started(config=quiet()):
        answers = mpi.rank(), mpi.size(), mpi.device(), mpi.has_cuda()
        table = mpi.collective_availability()
    agree.equal(answers[:2], (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size))
    agree.equal(answers[2].type == "cuda", answers[3])
    agree.equal(table["mpi", "allreduce", "cpu", "async"], "available")
    agree.equal(table["gloo", "alltoall", "cpu", "async"], "available")
    agree("mpi" in str(table) and "allreduce_async" in str(table))
