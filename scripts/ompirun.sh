#!/usr/bin/env bash
# mpirun with the options that the MPI at hand needs: as root, with fewer cores than ranks, with a time limit.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/ompirun.sh -n RANKS [OPTIONS] COMMAND [ARGUMENT...]

Starts COMMAND with the mpirun that comes first on PATH (Open MPI, MPICH, Intel MPI or MVAPICH).

  -n RANKS          number of ranks; may exceed the number of cores
  --hostfile FILE   the hosts to use, one per line in the format of that MPI
  --option OPTION   one more word for mpirun itself; may be repeated
  --timeout SECONDS end the job after that time, with status 124
  -v, --verbose     print the command before running it
  --dry-run         print the command and stop
  -h, --help        this text

Environment: HOSTFILE, the same as --hostfile; OMPI_OPTIONS, more words for the mpirun of Open MPI.
Signals reach mpirun itself, which passes them on to the ranks; the status is that of mpirun.
HELP
}

ranks='' options=() limit='' verbose=no dry_run=no
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        -v | --verbose) verbose=yes; shift; continue ;;
        --dry-run) dry_run=yes; shift; continue ;;
        --) shift; break ;;
        -n | -np | --hostfile | -hostfile | --option | --timeout) [ $# -gt 1 ] || fail "$1 needs a value" "See $0 --help" ;;
        -*) fail "unknown option '$1'" "Options of mpirun itself go through --option; see $0 --help" ;;
        *) break ;;
    esac
    case $1 in
        -n | -np) ranks=$2 ;;
        --hostfile | -hostfile) HOSTFILE=$2 ;;
        --option) options+=("$2") ;;
        --timeout) limit=$2 ;;
    esac
    shift 2
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "-n needs a number of ranks, not '$ranks'" "See $0 --help"
[[ $limit =~ ^[0-9]*$ ]] || fail "--timeout needs seconds, not '$limit'"
[ $# -gt 0 ] || fail "no command to run" "See $0 --help"

launch_command "$ranks"
command=("${launch[@]}" ${options[@]+"${options[@]}"} "$@")
if [ -n "$limit" ]; then
    # KILL after ten more seconds: a hung job can make mpirun deaf to TERM. --foreground: one TERM, not a second one to
    # the process group, which Open MPI 4.1 takes for the order to leave at once, without its ranks.
    command=(timeout --foreground -k 10 "$limit" "${command[@]}")
fi
if [ $verbose = yes ] || [ $dry_run = yes ]; then
    printf '%q ' "${command[@]}"
    echo
fi
[ $dry_run = no ] || exit 0
exec "${command[@]}"
