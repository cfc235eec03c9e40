#!/usr/bin/env bash
# Trains, uses a parameter server, catches errors, stops and starts again, for a time; fails if resources grow.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/soak.sh SECONDS [RANKS]

Runs benchmarks/soak.py with the torchmpi on PATH, on 3 ranks unless told otherwise. Prints resident
memory, shared memory, descriptors, threads and mapped files of /dev/shm over time. The status is not 0 if one of them has
grown by more than a bound (in benchmarks/soak.py) after the first fifth of the time, if the job has failed or has not
ended, or if it has left entries in /dev/shm. One hour: scripts/soak.sh 3600
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
torchmpi run -n "${2:-3}" --timeout $limit "$checkout/benchmarks/soak.py" "$1" || status=$?
left=$(comm -13 <(printf '%s\n' "$before") <(entries))
[ -z "$left" ] || fail "left in /dev/shm: $left"
[ "$status" != 124 ] || fail "had not ended after $limit s, and was ended by SIGTERM" "Ranks that outnumber the cores, or" \
    "other programs, make the start and a cycle longer than ten minutes: give fewer RANKS."
[ "$status" = 0 ] || fail "failed with status $status"
say "nothing has grown beyond its bound, and nothing is left in /dev/shm"
