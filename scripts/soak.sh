#!/usr/bin/env bash
# Trains, uses a parameter server, catches errors, stops and starts again, for a time; fails if resources grow.
# Or trains while ranks are killed, for a time; fails if the result is not that of a run without kills.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/soak.sh SECONDS [RANKS [KILL_EACH]]

Runs benchmarks/soak.py with the torchmpi on PATH, on 3 ranks unless told otherwise. Prints resident
memory, shared memory, descriptors, threads and mapped files of /dev/shm over time. The status is not 0 if one of them has
grown by more than a bound (in benchmarks/soak.py) after the first fifth of the time, if the job has failed or has not
ended, or if it has left entries in /dev/shm. One hour: scripts/soak.sh 3600

With KILL_EACH it runs benchmarks/soak_kills.py instead, which needs Open MPI: one rank is killed in each period of so many
seconds, and a spare one takes its place. The status is not 0 if a loss, a weight or a momentum differs by a bit from those
of a run without kills, if the job has failed or has not ended, or if entries are left in /dev/shm. An hour with a kill each
minute: scripts/soak.sh 3600 4 60
HELP
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || fail "wants the duration in seconds, not '${1:-}'" "See $0 --help"

# The entries of this user that no process has mapped.
entries() {
    [ -d /dev/shm ] || return 0
    local path
    find /dev/shm -mindepth 1 -maxdepth 1 -user "$(id -u)" | sort | while read -r path; do
        grep -qsF "$path" /proc/[0-9]*/maps || say "$path"
    done
}

before=$(entries)
status=0 limit=$((${1} + 600))
finding="nothing has grown beyond its bound"
if [ -z "${3:-}" ]; then
    torchmpi run -n "${2:-3}" --timeout $limit "$checkout/benchmarks/soak.py" "$1" || status=$?
else
    finding="all bits are those of a run without kills" folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    with_spares="--spares $(($1 / $3 + 4)) $checkout/benchmarks/soak_kills.py $folder $1 --kill-each $3"
    for options in "$with_spares" "$checkout/benchmarks/soak_kills.py $folder $1"; do
        # shellcheck disable=SC2086 # words
        [ "$status" != 0 ] || torchmpi run -n "$2" --on-lost-rank continue --timeout $limit $options || status=$?
    done
fi
left=$(comm -13 <(printf '%s\n' "$before") <(entries))
[ -z "$left" ] || fail "left in /dev/shm: $left"
[ "$status" != 124 ] || fail "had not ended after $limit s, and was ended by SIGTERM" "Ranks that outnumber the cores, or" \
    "other programs, make the start and a cycle longer than ten minutes: give fewer RANKS."
[ "$status" = 0 ] || fail "failed with status $status"
say "$finding, and nothing is left in /dev/shm"
