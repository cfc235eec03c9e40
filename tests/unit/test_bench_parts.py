"""To a user of ``torchmpi bench``: arguments, workloads, the model and the statistics are right, without a job."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import torchmpi.cli
from torchmpi.cli import launching
from torchmpi.cli.bench import collective_bench, models, options, timing, training
from torchmpi.cli.bench.bench_job import BenchJob
from torchmpi.cli.bench.contestants import Copy, Ours, TorchDistributed, our_contestants
from torchmpi.cli.bench.workload import BenchCase, Workload
from torchmpi.cli.launching import Program
from torchmpi.collective_specs import IN_PLACE, SPECS
from torchmpi.launch import launcher

# --- the command line


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--collectives", "allreduce,sing"], "'sing' is no collective; choose among allreduce, reduce"),
        (["--verbs", "sing"], "'sing' is no collective"),
        (["--dtypes", "float12"], "'float12' is no dtype; choose among float32"),
        (["--peers", "none,gloo"], "none stands alone"),
        (["--collectives", "all,reduce"], "all stands alone"),
        (["--through", "nccl"], "'nccl' is no interface; choose among native, dist, hvd, nn"),
        (["--backends", "dist"], "'dist' is no backend; choose among auto, mpi"),
        (["--backends", "nonsense"], "'nonsense' is no backend; choose among auto, mpi"),
        (["--sizes", "4:x"], "'x' is no size from 1 byte to 64G; write 4:256M"),
        (["--sizes", "1M:4"], "begins above its end"),
        (["--sizes", "0"], "'0' is no size"),
        (["--sizes", "100000G"], "is no size"),
        (["-n", "0"], "numbers of ranks from 1"),
        (["-n", "two"], "numbers of ranks from 1"),
        (["--seconds", "-1"], "is no time"),
        (["--seconds", "nan"], "is no time"),
        (["train", "--model", "gpt"], "'gpt' is no model; choose among mlp, cnn, resnet, transformer, offloaded"),
        (["parallel", "--widths", "100"], "'100': write multiples of 64 up to 16384"),
        (["parallel", "--workloads", "gpt"], "'gpt' is no workload; choose among decoding, experts, training"),
        (["parallel", "--batches", "0"], "'0': write multiples of 1 up to 16384, such as 8,16"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_errors_about_arguments_name_the_allowed_values(given, words, capsys):
    with pytest.raises(SystemExit) as ended:
        torchmpi.cli.main(["bench", *given])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_sizes():
    assert options.sizes("4:256M") == tuple(4**exponent for exponent in range(1, 15))
    assert options.sizes("1K") == (1024,) and options.sizes("64k, 4 ,64K") == (4, 65536)
    for number in (4, 1024, 65536, 1 << 20, 1 << 30):
        assert options.size(options.short_size(number)) == number


def test_tensors_on_a_device_have_no_shared_memory_and_a_figure_for_the_launch():
    def names(**options):
        return [ours.name for ours in our_contestants(("auto", "mpi"), ("plain", "shared"), **options)]

    assert names(asynchronous=True) == ["auto", "mpi", "auto shared", "mpi shared"]
    assert names(asynchronous=False, device="cuda") == ["auto", "mpi"]
    assert names(asynchronous=True, device="cuda") == ["auto", "mpi", "auto launch"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing is refused")
def test_without_a_gpu_no_job_is_started_for_one(capsys):
    assert torchmpi.cli.main(["bench", "--device", "cuda"]) != 0
    assert "--device cuda: this torch or this host has no CUDA" in capsys.readouterr().err


# --- workloads


@pytest.fixture
def alone_on_gloo(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


MOVING = [collective for collective in options.COLLECTIVES if collective != "barrier"]


def workloads(collective, dtype="float32", num_bytes=20_000, size=2, *, out_of_place=False):
    case = BenchCase(collective, dtype, num_bytes, out_of_place)
    return [Workload(case, rank=rank, size=size) for rank in range(size)]


def write_results(works: list[Workload], collective: str, root: int) -> None:
    """Write the results of the collective, without any communication."""
    sources = [work.source.clone() for work in works]
    size = len(works)
    for rank, work in enumerate(works):
        if SPECS[collective].reduces:
            total = torch.stack([source.to(torch.int64) for source in sources]).sum(0)
            if collective != "reduce" or rank == root:
                work.target.copy_(total.chunk(size)[rank] if collective == "reduce_scatter" else total)
        elif collective in ("broadcast", "sendreceive"):
            work.target.copy_(sources[root if collective == "broadcast" else (rank - 1) % size])
        elif collective == "allgather" or (collective == "gather" and rank == root):
            work.target.copy_(torch.cat(sources))
        elif collective == "scatter":
            work.target.copy_(sources[root].chunk(size)[rank])
        elif collective == "alltoall":
            work.target.copy_(torch.cat([source.chunk(size)[rank] for source in sources]))


@pytest.mark.parametrize("collective", MOVING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("size", "out_of_place"), [(1, False), (3, False), (3, True)])
def test_right_results_pass_and_wrong_ones_do_not(collective, dtype, size, out_of_place):
    works = workloads(collective, dtype, size=size, out_of_place=out_of_place)
    for root in range(size if SPECS[collective].is_rooted else 1):
        for work in works:
            work.fill()
        assert size == 1 or not all(work.is_right(root) for work in works), "nothing was done"
        write_results(works, collective, root)
        assert all(work.is_right(root) for work in works)
        checked = works[root] if collective in ("reduce", "gather") else works[-1]
        for position in (0, checked.target.numel() // 2, -1):
            right = checked.target[position].item()
            checked.target[position] = right + 1
            assert not checked.is_right(root)
            checked.target[position] = right


@pytest.mark.parametrize("collective", MOVING)
def test_the_larger_tensor_has_the_requested_size(collective):
    work = workloads(collective, num_bytes=4096, size=4)[0]
    assert work.payload_bytes == 4096 == 4 * max(work.source.numel(), work.target.numel())
    has_one_tensor = collective in (*IN_PLACE, "sendreceive")
    assert work.is_in_place == (work.source is work.target) == has_one_tensor
    assert workloads(collective, out_of_place=True)[0].is_in_place == (collective == "sendreceive")
    tiny = workloads(collective, "float64", 4, size=4)[0]  # at least one element, or one per part
    assert tiny.payload_bytes == (8 if has_one_tensor else 32)


def test_a_barrier_is_one_case_without_tensors():
    verbs, sizes = ("barrier", "reduce", "gather"), (4, 16)
    given = SimpleNamespace(verbs=verbs, dtypes=("int8", "float32"), sizes=sizes, out_of_place=True)
    cases = collective_bench.cases(given)
    assert len(cases) == 9 and [case.collective for case in cases].count("barrier") == 1
    work = Workload(cases[0], rank=0, size=2)
    assert work.payload_bytes == 0 and work.is_right(0)
    assert Copy().why_not("barrier", "") and Ours(None, "shared", asynchronous=False).why_not("barrier", "")
    assert Ours(None, "plain", asynchronous=True).why_not("barrier", "") == "there is no barrier_async()"
    assert Ours("mpi", "plain", asynchronous=False).why_not("sendreceive", "int8")


def test_peers_without_an_argument_for_the_result_copy_first(alone_on_gloo):
    gloo = TorchDistributed("gloo", None, asynchronous=False)
    known = [collective for collective in IN_PLACE if gloo.why_not(collective, "float32") is None]
    assert known
    for collective in known:
        (work,) = workloads(collective, size=1, out_of_place=True)
        work.fill()
        gloo.bind(work, 0)()
        assert work.is_right(0) and work.target is not work.source


# --- numbers


def test_model():
    assert collective_bench.cost("allreduce", 1, 1000) == (0, 0)
    assert collective_bench.cost("allreduce", 2, 1000) == (2, 1000)
    assert collective_bench.cost("broadcast", 5, 1000) == (3, 1000)
    assert collective_bench.cost("alltoall", 4, 1000) == (3, 750)
    assert collective_bench.cost("sendreceive", 4, 1000) == (1, 1000)
    assert collective_bench.cost("barrier", 5, 0) == (3, 0)


def test_quartiles():
    sample = timing.summarize([number * 1e-6 for number in range(1, 9)], calls_per_batch=2)
    assert (sample.median_us, sample.num_batches, sample.calls_per_batch) == (2.25, 8, 2)
    assert sample.low_us < sample.median_us < sample.high_us and sample.spread > 0
    assert timing.summarize([2e-6], calls_per_batch=1).spread == 0


class Two:
    """The part of a communicator that the clock uses: this rank, and one with given numbers."""

    def __init__(self, *others: float) -> None:
        self.others = others

    def Allreduce(self, mine, result, op) -> None:
        result[:] = [max(pair) for pair in zip(mine, self.others, strict=True)]


def test_a_batch_lasts_from_the_first_rank_to_the_last(monkeypatch):
    """Regression: with two ranks on a core the second began when the first had ended, and both times were short."""
    monkeypatch.setattr(timing.mpi_library, "load", lambda: SimpleNamespace(MAX=None))
    first, second = timing.BatchInterval(10.0, 11.0), timing.BatchInterval(11.0, 12.0)
    assert timing._durations([first], Two(second.end, -second.begin), True) == [2.0]
    assert timing._durations([first], Two(second.end - second.begin), False) == [1.0]


def test_shares_of_time():
    job = SimpleNamespace(rank=1, comm=SimpleNamespace(bcast=lambda left: 12.0))
    job.show, kept = partial(BenchJob.show, job), []
    job.keep = lambda rows, unfinished: kept.append((len(rows), unfinished))
    tasks = [(f"task {weight}", weight, lambda seconds: [seconds]) for weight in (1.0, 2.0, 3.0)]
    assert BenchJob.run_in_turn(job, tasks, 12.0) == [2.0, 12.0 * 2 / 5, 12.0]
    assert kept == [(1, ["task 2.0", "task 3.0"]), (2, ["task 3.0"]), (3, [])]


# --- training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "transformer", "offloaded"])
def test_tasks_start_equal_with_different_data(name):
    one, other = (models.make_task(name, rank=rank, layer_seconds=0) for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))
    assert not torch.equal(one.inputs, other.inputs)
    trainer = training.Trainer(one, None)
    before = [parameter.clone() for parameter in one.net.parameters()]
    trainer.step()
    assert all(parameter.grad is not None for parameter in one.net.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, one.net.parameters(), strict=True))


def test_buckets_of_ddp_hold_everything(alone_on_gloo, monkeypatch):
    tensors = [torch.full((numel,), float(numel)) for numel in (5, 1, 7, 3)]
    buckets = training.fill_buckets(tensors, 16)
    assert sum(bucket.flat.numel() for bucket in buckets) == 16
    assert all(bucket.flat.nbytes >= 16 for bucket in buckets[:-1])

    def held():
        return torch.cat([bucket.flat for bucket in buckets])

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)  # on one rank the sums equal the inputs
    whole = torch.cat(tensors[::-1])
    training.average_copied(buckets)
    assert torch.equal(held(), whole / 2) and torch.equal(torch.cat(tensors[::-1]), whole / 2)
    training.average_buckets(buckets)
    training.sum_buckets(buckets)
    assert torch.equal(held(), whole / 4) and torch.equal(torch.cat(tensors[::-1]), whole / 2)


# --- starting jobs


def test_launch_commands(monkeypatch):
    monkeypatch.setattr(launching.affinity, "physical_cores", lambda: {0: (0, 0), 1: (0, 1)})
    open_mpi, mpich = Program("mpirun", "Open MPI 5.0.11", True), Program("mpiexec", "MPICH 5.0.2", True)
    assert launching.launch_command(open_mpi, 2) == ["mpirun", "-n", "2"]
    assert launching.launch_command(open_mpi, 3) == ["mpirun", "--oversubscribe", "-n", "3"]
    assert launching.launch_command(open_mpi, 2, unbound=True) == ["mpirun", "--bind-to", "none", "-n", "2"]
    assert launching.launch_command(mpich, 3, unbound=True) == ["mpiexec", "-n", "3"]


def test_detection_of_ranks(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert not launcher.is_rank()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not launcher.is_rank()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert launcher.is_rank()
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("PMIX_RANK", "0")
    assert launcher.is_rank()
