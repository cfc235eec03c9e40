#!/usr/bin/env bash
# PyTorch's own distributed test-suite, as it comes with PyTorch, over the backend "torchmpi".
set -uo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_torch_suite.sh [--mpi LIST] [-n LIST] [-k PATTERN]...

Runs torch.testing._internal.distributed.distributed_test over torchmpi on the ranks that mpirun starts. Every test has
to pass, or be skipped by PyTorch itself, or stand with its reason in tests/torch_suite/listed.py. Ends with a table;
the status is 0 only if nothing else happened. Logs: build/test/torch-suite/.

  --mpi LIST  which MPIs, default "openmpi mpich"; system is the one of this machine
  -n LIST     how many ranks, default "2 3 4"
  -k PATTERN  only tests whose names contain this, or match it if it has a *; may be repeated
  -h, --help  this text

Environment: PYTHON, the interpreter to use; VENV_DIR, where the private environments go (default .venv).
HELP
}

mpis="openmpi mpich" sizes="2 3 4" options=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --mpi) mpis=${2:?--mpi wants a list}; shift ;;
        -n) sizes=${2:?-n wants a list}; shift ;;
        -k) options+=(-k "${2:?-k wants a pattern}"); shift ;;
        *) fail "unknown option '$1'" "See $0 --help" ;;
    esac
    shift
done

cd "$checkout" || exit 1
find_python
logs=$checkout/build/test/torch-suite
mkdir -p "$logs" || fail "FAILED: cannot write to $logs" "Work in a copy of the checkout that belongs to you."
rm -f "$logs/summary.txt"
status=0
for name in $mpis; do
    choose_mpi "$name" dev || fail "FAILED: the environment for $name could not be made (the reason is above)"
    use_environment "$mpi"
    for ranks in $sizes; do
        launch_command "$ranks"
        printf "\n== %s, %s ranks\n" "$mpi" "$ranks"
        python tests/torch_suite/driver.py --logs "$logs/$mpi-n$ranks" --summary "$logs/summary.txt" \
            ${options[@]+"${options[@]}"} -- "${launch[@]}" || status=1
    done
done
say ""
cat "$logs/summary.txt"
exit $status
