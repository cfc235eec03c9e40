#!/usr/bin/env bash
# Runs all tests several times in a row on a machine that endless loops keep busy, until a run fails.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/busy_runs.sh [RUNS [LOOPS]]

Runs scripts/test_cpu.sh 10 times in a row beside 4 endless loops, unless told otherwise, and prints a row of a table for each
run: tests, seconds, and the load average at its end. The first run that fails is the last one; its output is shown.
HELP
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
runs=${1:-10} num_loops=${2:-4}
[[ $runs =~ ^[1-9][0-9]*$ && $num_loops =~ ^[0-9]+$ ]] || fail "wants numbers of runs and of loops, not '$*'" "See $0 --help"

# The loops are a session of their own, as if they had been started in another terminal.
setsid bash -c 'for ((number = 0; number < $1; number++)); do while :; do :; done & done; wait' loops "$num_loops" &
loops=$!
log=$(mktemp)
trap 'kill -- "-$loops" 2>/dev/null; rm -f "$log"' EXIT

say "| run | result | seconds | load |"
say "|---|---|---|---|"
for ((run = 1; run <= runs; run++)); do
    began=$SECONDS status=0
    bash "$(dirname "${BASH_SOURCE[0]}")/test_cpu.sh" >"$log" 2>&1 || status=$?
    result=$(grep -aE 'seconds of CPU$' "$log" | tail -n 1) || result="no result"
    say "| $run | $result | $((SECONDS - began)) | $(cut -d ' ' -f 1 /proc/loadavg) |"
    [ "$status" = 0 ] || { cat "$log"; exit "$status"; }
done
