"""Start the program of one rank: set the variables of torch.distributed, and redirect the output.

``torchmpi run`` starts this file between mpirun and the program, which then replaces it. Only the standard library is
imported, since the file delays the start of each rank.
"""

import argparse
import os
import subprocess
import sys

# Rank, number of ranks, rank on the host and number of ranks on the host: of Open MPI, and of MPICH and Intel MPI.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def main(arguments: list[str]) -> None:
    """Replace this process by the program, with the variables of its rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", required=True)
    parser.add_argument("--log-dir")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    names = next((names for names in _VARIABLES if all(name in os.environ for name in names)), None)
    if names is None:
        sys.exit("torchmpi run: mpirun has not set the variables that tell a process its rank. Start mpirun itself.")
    numbers = [os.environ[name] for name in names]
    os.environ.update(zip(_TORCH_VARIABLES, numbers, strict=True))
    address, _, port = options.master.rpartition(":")
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", port)
    # It distinguishes the rank from its child processes, which inherit the other variables.
    os.environ["TORCHMPI_RUN_PID"] = str(os.getpid())
    if options.log_dir is not None:
        _redirect(options.log_dir, f"rank{numbers[0]}.log", is_shown=numbers[0] == "0")
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"torchmpi run: {program[0]} cannot be started: {error.strerror}")


def _redirect(folder: str, name: str, is_shown: bool) -> None:
    """Append the output to a file, and show it in the terminal too if `is_shown`."""
    path = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        sys.exit(f"torchmpi run: --log-dir: {path} cannot be written: {error.strerror}")
    for stream in (1, 2):
        if is_shown:  # a process of its own for each stream, since both keep their target in the terminal
            command = ["tee", "-a", path]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stream, start_new_session=True)
            assert process.stdin is not None
            os.dup2(process.stdin.fileno(), stream)
            process.stdin.close()
        else:
            os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    main(sys.argv[1:])
