#!/usr/bin/env bash
# Stands between mpirun and a program: gives each rank of a host its own cores, one GPU and a log file.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: mpirun -n RANKS scripts/wrap.sh [--no-bind] [--gpu] [--log-dir DIR] [--] COMMAND [ARGUMENT...]

  --no-bind      leave the cores to the launcher and to torchmpi. Otherwise each rank of this host gets an equal share of the
                 cores, unless the launcher has bound it already or ranks outnumber cores
  --gpu          show each rank one GPU: local rank modulo the GPUs listed in CUDA_VISIBLE_DEVICES or by nvidia-smi
  --log-dir DIR  append the output of rank N to DIR/rankN.log; rank 0 goes to the terminal as well
  -h, --help     this text

COMMAND gets MPI_MY_NODE, the name of this host, and MPI_NODES, the lines of the file HOSTFILE or this host.
Works under each launcher that torchmpi knows (docs/runtime.md); alone it is rank 0 of 1.
HELP
}

refuse() {
    printf 'wrap.sh: %s (see scripts/wrap.sh --help)\n' "$*" >&2
    exit 2
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
[ -z "${NVPROF:-}" ] || refuse "NVPROF is set, but nvprof is no more: unset it and wrap nsys, as in 'wrap.sh nsys profile COMMAND'"
[ -z "${LOG_TO_FILE:-}" ] || refuse "LOG_TO_FILE is set: unset it, and name a folder with --log-dir"
MPI_MY_NODE=$(uname -n) MPI_NODES=$(uname -n)
if [ -n "${HOSTFILE:-}" ]; then
    MPI_NODES=$(cat "$HOSTFILE") || refuse "HOSTFILE=$HOSTFILE cannot be read"
fi
export MPI_MY_NODE MPI_NODES
exec python3 -I -S "$(dirname "${BASH_SOURCE[0]}")/../torchmpi/cli/rank_start.py" --bind "$@"
