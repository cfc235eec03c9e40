"""To a user of ``torchmpi bench`` and of benchmarks/: each contestant has a time, or a reason for none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.launching import ROOT, Result, fake_mpirun, job_environment, search_path

from torchmpi.cli.bench import options
from torchmpi.cli.bench.call_bench import CALLS
from torchmpi.collective_specs import IN_PLACE

pytestmark = pytest.mark.any_mpi

BENCH = ["-m", "torchmpi", "bench"]
COLLECTIVES = ",".join(name for name in options.COLLECTIVES if name != "barrier")


def script_command(name: str) -> list[str]:
    return [str(ROOT / "benchmarks" / f"{name}.py")]


def rows_of(path: Path, result: Result) -> list[dict]:
    """The rows of a file; each has figures that make sense, or a reason."""
    assert result.returncode == 0, result.output
    report = json.loads(path.read_text())
    assert all(job["facts"]["mpi"] and job["facts"]["versions"]["torch"] for job in report["jobs"])
    for row in report["rows"]:
        if "why_not" in row:
            assert row["why_not"] and "wrong" not in row["why_not"], row
        elif "median_us" in row:
            assert 0 < row["low_us"] <= row["median_us"] <= row["high_us"] and row["num_batches"] >= 7, row
    return report["rows"]


def test_every_collective_and_contestant(launch, tmp_path):
    file = tmp_path / "a.json"
    arguments = ["--collectives", f"{COLLECTIVES},barrier", "--sizes", "4K", "--seconds", "0.02"]
    rows = rows_of(file, launch(2, [*BENCH, *arguments, "--out-of-place", "--json", file]))
    found = {(row["verb"], row["bytes"]) for row in rows}
    assert found == {(collective, 4096) for collective in COLLECTIVES.split(",")} | {("barrier", 0)}
    out_of_place = {row["verb"] for row in rows if row["mode"] == "sync out of place"}
    assert out_of_place == set(IN_PLACE)
    for cell in found:
        here = {row["contestant"]: row for row in rows if (row["verb"], row["bytes"]) == cell}
        assert {"auto", "mpi", "auto shared", "mpi4py", "gloo", "horovod", "copy"} <= set(here)
        measured = {"auto", "mpi4py", "gloo"} | (
            {"mpi", "copy"} if cell[0] not in ("sendreceive", "barrier") else set()
        )
        assert all("median_us" in here[name] for name in measured), (cell, here)


def test_through_each_interface(launch, tmp_path):
    file = tmp_path / "a.json"
    arguments = ["--collective", "all", "--through", "nn,hvd,native,dist", "--sizes", "4K", "--backends", "auto"]
    arguments += ["--memory", "plain", "--peers", "none", "--seconds", "0.02"]
    rows = rows_of(file, launch(2, [*BENCH, *arguments, "--json", file]))
    assert list(dict.fromkeys(row["contestant"] for row in rows if "median_us" in row)) == [
        "nn", "hvd", "auto", "dist", "copy",
    ]  # fmt: skip
    measured = {
        name: {row["verb"] for row in rows if row["contestant"] == name and "median_us" in row}
        for name in ("auto", "dist", "hvd", "nn")
    }
    assert measured["auto"] == measured["dist"] == set(options.COLLECTIVES)
    both = {"allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall"}
    assert measured["hvd"] == both | {"barrier"} and measured["nn"] == both | {"sendreceive"}


def test_every_other_call(launch, tmp_path):
    file = tmp_path / "a.json"
    result = launch(3, [*BENCH, "calls", "--sizes", "4K", "--seconds", "0.02", "--json", file])
    rows = rows_of(file, result)
    assert {row["verb"] for row in rows} == set(CALLS)
    of_torchmpi = ("auto", "auto async", "dist", "dist async", "dist coalesced", "hvd", "nn")
    assert all("median_us" in row for row in rows if row["contestant"] in (*of_torchmpi, "mpi4py"))
    assert {row["contestant"] for row in rows} >= {*of_torchmpi, "mpi4py", "copy", "fill"}
    copied = {row["verb"] for row in rows if row["contestant"] == "copy"}
    assert copied == {title for title, row in CALLS.items() if row.is_sized}
    assert "broadcast of an object" in result.stdout and "no figures" not in result.stdout, result.output


def test_models_divided_over_the_ranks(launch, tmp_path):
    """Each contestant has been compared with one process."""
    file = tmp_path / "a.json"
    result = launch(2, [*BENCH, "parallel", "--widths", "128", "--batches", "8", "--seconds", "0.02", "--json", file])
    rows = rows_of(file, result)
    assert all("median_us" in row for row in rows), rows
    found = {(row["workload"], row["contestant"]): row for row in rows}
    found.pop(("decoding", "one process, 2 threads"), None)  # if the ranks have two cores
    forms = {
        "decoding": (["tensor_parallel", "its products"], ["DTensor"]),
        "experts": (["MixtureOfExperts", "its messages"], ["torch.distributed", "its messages"]),
        "training": (
            ["no communication", "averaged gradients", "DDP without communication", "tensor_parallel"],
            ["DDP", "DDP in 16 bits", "FSDP2", "1F1B", "its messages"],
        ),
        "sequence": (["ring attention", "its messages"], ["ring attention", "its messages"]),
    }
    expected = {(name, form) for name, (ours, _) in forms.items() for form in ["one process", *ours]}
    expected |= {
        (name, f"{form} on {group}")
        for name, (_, both) in forms.items()
        for form in both
        for group in ("gloo", "torchmpi")
    }
    assert found.keys() == expected
    # Parameters, gradients and momentum; with FSDP2 each rank has a half.
    whole = 3 * 4 * 4 * 2 * (128 * 128 + 128)
    held = {name: row["held_bytes"] for (workload, name), row in found.items() if workload == "training"}
    assert held["one process"] == held["DDP on torchmpi"] == held["averaged gradients"] == whole
    assert held["FSDP2 on torchmpi"] == held["FSDP2 on gloo"] == whole / 2
    assert held["1F1B on torchmpi"] == whole / 2 and whole / 2 < held["tensor_parallel"] < 0.51 * whole
    # By rings, as docs/which-parallelism.md has it, and a few bytes by which the ranks agree.
    weights, activation = whole // 3, 8 * 128 * 4
    expected_bytes = dict.fromkeys((("training", "DDP on torchmpi"), ("training", "averaged gradients")), weights)
    expected_bytes |= {
        ("training", "DDP in 16 bits on torchmpi"): weights / 2,
        ("training", "FSDP2 on torchmpi"): 3 / 2 * weights,
        ("training", "tensor_parallel"): 7 * activation,  # the input of the first block needs no gradient
        ("training", "1F1B on torchmpi"): activation,
        ("training", "its messages on torchmpi"): activation,
        ("sequence", "ring attention"): 2 * 1024 * 128 * 4,
        ("sequence", "ring attention on torchmpi"): 2 * 1024 * 128 * 4,
    }
    sent = {key: found[key]["sent_bytes"] for key in expected_bytes}
    assert sent == {key: pytest.approx(number, rel=1e-3) for key, number in expected_bytes.items()}


def test_results_until_the_time_limit_are_kept(alone, tmp_path):
    """Regression: everything that the job had measured was thrown away. The last task never ends here."""
    file = tmp_path / "a.json"
    program = tmp_path / "limited.py"
    program.write_text(f"""
import sys
from pathlib import Path
from torchmpi.cli import main
from torchmpi.cli.bench import command
from torchmpi.cli.launching import ProcessResult

class LimitReached(Exception):
    pass

def run_until_first_results(arguments, *, seconds, tick, run=command.run_limited):
    def check():
        tick()
        if Path(arguments[-1]).with_name(command.RESULT_SO_FAR).exists():
            raise LimitReached
    try:
        return run(arguments, seconds=seconds, tick=check)
    except LimitReached:
        return ProcessResult(None, "", "", 25.0)

command.run_limited = run_until_first_results
command._BOOTSTRAP = (
    "import sys, time; sys.path.append(sys.argv[1]); from torchmpi.cli.bench import bench_job, training; "
    "training.make_task, given = (lambda model, **o: time.sleep(600) if model == 'cnn' else given(model, **o)), "
    "training.make_task; bench_job.run_task(sys.argv[2])"
)
sys.exit(main(["bench", "train", "--quick", "--seconds", "0.02", "-n", "2", "--json", {str(file)!r}]))
""")
    result = alone(program)
    assert result.returncode == 1, result.output
    assert "mlp: training step, 2 ranks" in result.stdout, result.output
    assert "did not end in 25 s. Not measured: cnn steps. Allow more time" in result.stderr, result.output
    assert {row["model"] for row in json.loads(file.read_text())["rows"]} == {"mlp"}


def test_jobs_of_its_own_and_all_results(alone, tmp_path):
    pytest.importorskip("matplotlib", reason="for --plot: install the extra examples")
    file, plot = tmp_path / "a.json", tmp_path / "a.png"
    result = alone(*BENCH, "--sizes", "4,4K", "--seconds", "0.02", "-n", "1,2", "--json", file, "--plot", plot)
    assert {(row["ranks"], row["bytes"]) for row in rows_of(file, result)} == {(1, 4), (1, 4096), (2, 4), (2, 4096)}
    assert plot.read_bytes().startswith(b"\x89PNG")
    for words in ("allreduce float32, 1 rank", "allreduce float32, 2 ranks", "of copy", str(file), str(plot)):
        assert words in result.stdout, result.output
    assert "1/2 allreduce float32 4, 1 rank, 0 s" in result.stderr, result.output  # at most a line in ten seconds
    compared = alone(*BENCH, "compare", file, file)
    assert compared.returncode == 0 and " 0 faster, 0 slower" in compared.stdout, compared.output


def test_a_job_that_mpirun_started(launch, tmp_path):
    file = tmp_path / "a.json"
    options = ["--collectives", "allreduce,broadcast,reduce,sendreceive", "--dtypes", "bfloat16,int64", "--sizes", "4K"]
    options += ["--seconds", "0.02", "--async", "--details", "--json", file]
    result = launch(2, [*BENCH, *options])
    rows = rows_of(file, result)
    assert {(row["ranks"], row["mode"], row["dtype"]) for row in rows} == {
        (2, "async", "bfloat16"),
        (2, "async", "int64"),
    }
    assert all("median_us" in row for row in rows if row["contestant"] in ("auto", "gloo"))
    why = next(row for row in rows if row["contestant"] == "mpi4py" and row["dtype"] == "bfloat16")
    assert "cannot add bfloat16" in why["why_not"]
    assert result.stdout.count("torchmpi bench collectives") == 1, result.output  # one report, by one rank


def test_ranks_of_different_hosts(job):
    code = """
        import os, sys
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
        os.environ["TORCHMPI_HOST_NAME"] = "ab"[rank]
        from torchmpi.cli import main
        sys.exit(main(["bench", "--sizes", "4", "--seconds", "0.02", "--peers", "gloo", "--details"]))
        """
    result = job(2, code)
    assert result.returncode == 0 and "2 hosts" in " ".join(result.stdout.split()), result.output  # wrapped anywhere
    line = next(line.split() for line in result.stdout.splitlines() if line.split()[1:2] == ["gloo"])
    assert "-" not in line[4:6], result.output  # gloo has connected the ranks through a port


def test_only_the_requested_contestants(launch, tmp_path):
    file = tmp_path / "a.json"
    options = ["--backends", "mpi", "--peers", "none", "--memory", "plain", "--sizes", "4", "--seconds", "0.02"]
    result = launch(1, [*BENCH, *options, "--json", file])
    assert [row["contestant"] for row in rows_of(file, result)] == ["mpi", "copy"]


def test_what_a_job_refuses(launch):
    for command, words in (
        ([*BENCH, "-n", "2"], "the launcher determines"),
        (script_command("memory"), "Run it without mpirun"),
        (script_command("starts"), "Run it without mpirun"),
    ):
        result = launch(1, command)
        assert result.returncode != 0 and words in result.stderr and "Traceback" not in result.stderr, result.output


def test_training(job, tmp_path):
    """Communication alone with a small network in place of ResNet-50, whose gradients take a minute."""
    code = """
        import sys
        from torch import nn
        from torchmpi.cli import main
        from torchmpi.cli.bench import training
        training.resnet50 = lambda: nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 10))
        sys.exit(main(["bench", "train", "--model", "mlp", "--seconds", "0.02", "--json", FILE]))
        """
    file = tmp_path / "a.json"
    rows = rows_of(file, job(2, code.replace("FILE", repr(str(file)))))
    steps = {row["contestant"] for row in rows if row["part"] == "step" and "median_us" in row}
    assert steps >= {"no communication", "communication alone", "synchronize_gradients", "register_async_backward"}
    assert not any("bf16" in name for name in steps)  # within a host it only costs time
    parts = {row["contestant"] for row in rows if row["part"] == "communication" and "median_us" in row}
    assert parts >= {"synchronize_gradients", "mpi4py"}
    named = {row["contestant"] for row in rows}
    assert {"ddp", "gloo buckets", "ddp's way on gloo"} <= named


@pytest.mark.release
def test_starts(alone, tmp_path):
    file = tmp_path / "a.json"
    result = alone(*script_command("starts"), "--count", "1", "--size", "64K", "--json", file)
    assert [(row["start"], row["contestant"]) for row in rows_of(file, result)] == [(1, "auto")]
    assert "of 1 starts" in result.stdout


def test_leaks(launch, tmp_path):
    file = tmp_path / "a.json"
    result = launch(2, [*script_command("leaks"), "--small", "500", "--scale", "0.01", "--json", file])
    rows = rows_of(file, result)
    numbers = {"4 B": 500, "1 MB": 100, "handles": 200, "groups": 50, "servers": 20, "starts": 3}
    assert {(row["rank"], row["part"], row["calls"]) for row in rows} == {
        (rank, part, number) for rank in (0, 1) for part, number in numbers.items()
    }
    assert all(row["descriptors_growth"] == 0 for row in rows), rows


@pytest.mark.release
def test_memory(alone, tmp_path):
    file = tmp_path / "a.json"
    rows = rows_of(file, alone(*script_command("memory"), "-n", "2", "--json", file))
    parts = [row["part"] for row in rows if row["rank"] == 1]
    assert parts == ["torch and mpi4py", "import torchmpi", "start()", "first calls", "torchmpi altogether"]
    assert all(row["resident_bytes"] > 50 << 20 for row in rows)


def test_parameter_server(launch, alone, tmp_path):
    file, script = tmp_path / "a.json", script_command("server")
    quiet = ["--parts", "speed,idle,link", "--sizes", "4K", "--seconds", "0.02", "--idle", "0.2", "--json", file]
    # Processes that are stopped while others are timed, and end with their parents, are no forks of a server.
    cold_children = f"""
import os, runpy, sys
del sys.argv[0]
sys.executable, sys.path[0] = {sys.executable!r}, os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    rows = rows_of(file, launch(2, ["-c", cold_children, *script, *quiet]))
    speed = [row for row in rows if row["part"] == "speed"]
    assert len({(row["verb"], row["bytes"]) for row in speed}) == 2
    assert {row["contestant"] for row in speed} == {"torchmpi", "mpi rma", "rpc", "rpc script", "rpc one call", "copy"}
    assert all("median_us" in row for row in speed if row["contestant"] in ("torchmpi", "mpi rma", "copy"))
    assert {row["what"] for row in rows if row["part"] == "idle"} >= {"no server", "server, no thread"}
    assert [row["why_not"][:31] for row in rows if row["part"] == "link"] == ["all ranks are on one host. Star"]
    with_thread = ["--parts", "rows,idle", "--sizes", "4K", "--seconds", "0.1", "--idle", "0.2", "--peers", "none"]
    rows = rows_of(file, launch(2, [*script, *with_thread, "--json", file], env={"TORCHMPI_SLOT_BYTES": "0"}))
    of_rows = [row for row in rows if row["part"] == "rows"]
    assert len(of_rows) == 6 and all("median_us" in row for row in of_rows), "sums of rows were right"
    assert "server with its thread" in {row.get("what") for row in rows}
    storm = ["--parts", "storm", "--seconds", "0.4", "--storm-ranks", "3", "--json", file]  # a job of its own
    storms = rows_of(file, alone(*script, *storm))
    assert len(storms) == 2 and all(row["is_exact"] and row["updates"] > 0 and row["ranks"] == 3 for row in storms)


def test_parameter_server_between_hosts(job):
    code = """
        import os, sys
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
        os.environ["TORCHMPI_HOST_NAME"] = "ab"[rank]
        sys.path.insert(0, FOLDER)
        sys.argv[1:] = "--parts storm,link --seconds 0.4 --gbit 1 --peers none".split()
        import server, server_parts
        server_parts._FAR_BYTES = 4 << 20
        sys.exit(server.run_script(server.make_parser(), server.run))
        """
    result = job(2, code.replace("FOLDER", repr(str(ROOT / "benchmarks"))))
    assert result.returncode == 0 and "WRONG" not in result.stdout, result.output
    for what in ("send", "receive"):
        line = next(line.split() for line in result.stdout.splitlines() if line.startswith(f"{what} "))
        assert float(line[3]) > 0 and line[-1].endswith("%"), result.output


# --- failures


def test_a_launcher_that_fails(alone, tmp_path):
    result = alone(*BENCH, "--quick", path=fake_mpirun(tmp_path, "echo no hosts today >&2; exit 3"))
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.output
    assert "ended with status 3" in result.stderr and "no hosts today" in result.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_the_job_ends_with_the_command(warm_python, tmp_path, number, status):
    path = fake_mpirun(
        tmp_path, f"sleep 600 & echo $! > {tmp_path}/child.new; mv {tmp_path}/child.new {tmp_path}/child; wait"
    )
    process = subprocess.Popen(
        [*warm_python, *BENCH, "--quick"], env=job_environment(search_path(path)), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    limit = time.monotonic() + 60
    while not (tmp_path / "child").exists():
        assert time.monotonic() < limit and process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=400)
    assert process.returncode == status and "Traceback" not in errors, errors
    child = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < limit + 30:  # it exists until init has reaped it
            os.kill(child, 0)
            time.sleep(0.05)
