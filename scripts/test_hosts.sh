#!/usr/bin/env bash
# The tests that depend on the network, on several hosts made of namespaces on this machine, under both MPIs and without one.
set -uo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_hosts.sh [--quick] [--faults] [--mpi LIST] [--layouts LIST] [-k EXPRESSION] [TEST...]

Makes three hosts with scripts/hosts.sh, runs tests of tests/mpi on their ranks, then faults of links and hosts, programs
of torchrun (both tests/hosts) and one without a launcher, and removes the hosts. Ends with a table, which is also written to
build/hosts/table.txt; the status is 0 only if nothing failed. Full logs: build/hosts/.

  --quick         two layouts, one MPI
  --faults        without the tests of tests/mpi
  --mpi LIST      which MPIs, default "openmpi mpich"
  --layouts LIST  ranks of each host, default "1,1 2,1 2,2 1,1,1 2,1,1 cyclic"; cyclic: ranks 0 and 2 on one host, 1 and 3 on
                  another
  -k EXPRESSION   only the tests that match, as in pytest
  TEST            files instead of the default ones
  -h, --help      this text

Skipped, with status 0 and the reason, without root or without the commands ip, tc, unshare and nsenter.
HELP
}

mpis="openmpi mpich" layouts="1,1 2,1 2,2 1,1,1 2,1,1 cyclic" tests=() pytest_options=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --quick) mpis=openmpi layouts="2,1 cyclic" ;;
        --faults) layouts="" ;;
        --mpi) mpis=${2:?--mpi wants a list}; shift ;;
        --layouts) layouts=${2:?--layouts wants a list}; shift ;;
        -k) pytest_options=(-k "${2:?-k wants an expression}"); shift ;;
        -*) fail "unknown option '$1'" "See $0 --help" ;;
        *) tests+=("$1") ;;
    esac
    shift
done
if [ ${#tests[@]} = 0 ]; then
    for name in fuzz comparison torch_groups communicators many two_level nn_sync nn_async nn_optimizer parameterserver distributed_ddp; do
        tests+=("tests/mpi/test_$name.py")
    done
fi

skip() {
    say "skipped: $*"
    exit 0
}
[ "$(id -u)" = 0 ] || skip "hosts are made of namespaces, which needs root"
for program in ip tc unshare nsenter setsid; do
    type -P "$program" >/dev/null || skip "there is no command $program (packages iproute2 and util-linux)"
done
unshare --net --mount true 2>/dev/null || skip "this root may not make namespaces (CAP_SYS_ADMIN)"

cd "$checkout" || exit 1
logs=$checkout/build/hosts
table=()
num_failed=0
find_python
rm -rf "$logs" && mkdir -p "$logs" || fail "cannot write to $logs"
for name in $mpis; do
    prepare_environment "$name" dev examples "$name" || exit 1
done
export HOSTS_STATE=${HOSTS_STATE:-/run/torchmpi-hosts} HOSTS_SHARE=$environments PYTHONUNBUFFERED=1
trap 'trap "" INT TERM; scripts/hosts.sh down' EXIT # not interrupted: timeout signals twice
trap 'exit 130' INT TERM
scripts/hosts.sh up 3 || exit 1
network=$(ip -4 -o addr show "${HOSTS_PREFIX:-tmpi}-br" | awk '{ print $4 }')

# job MPI LAYOUT: sets `launch` to the launch command for the ranks of a layout, and `ranks` to their number.
job() {
    local index=0 count list=""
    ranks=0
    for count in ${2//,/ }; do
        [ "$count" = cyclic ] && count=2
        list+=${list:+,}h$index:$count index=$((index + 1)) ranks=$((ranks + count))
    done
    [ "$2" != cyclic ] || list=h0:2,h1:2 ranks=4
    if [ "$1" = openmpi ]; then
        launch=("$VIRTUAL_ENV/bin/mpirun" --prtemca plm_ssh_agent "$HOSTS_STATE/agent" --prtemca prte_if_include "$network"
            --mca btl_tcp_if_include eth0 --mca mpi_yield_when_idle 1 --bind-to none -x PATH --host "$list")
        [ "$2" != cyclic ] || launch+=(--map-by node)
    else
        launch=("$VIRTUAL_ENV/bin/mpiexec" -localhost "${network%/*}" -launcher ssh -launcher-exec "$HOSTS_STATE/agent")
        if [ "$2" = cyclic ]; then launch+=(-hosts h0,h1 -ppn 1); else launch+=(-hosts "$list"); fi
    fi
    launch+=(-n "$ranks")
}

# record NAME SECONDS STATUS: one line of the table, from the last line of pytest's report.
record() {
    local result=ok summary
    [ "$3" != 5 ] || [ ${#pytest_options[@]} = 0 ] || set -- "$1" "$2" 0 # -k selected nothing here
    summary=$(grep -aoE '[0-9]+ (passed|failed|skipped|error)[a-z0-9, ]* in [0-9.]+s' "$logs/$1.log" | tail -n 1)
    if [ "$3" != 0 ]; then
        result=FAILED num_failed=$((num_failed + 1))
        grep -aE '^(FAILED|ERROR) |torchmpi: ' "$logs/$1.log" | head -n 20
        tail -n 5 "$logs/$1.log"
    fi
    table+=("$(printf '%-18s %-7s %5s s  %s' "$1" "$result" "$2" "${summary:-status $3}")")
    say "${table[-1]}"
}

for name in $mpis; do
    use_environment "$name"
    for layout in $layouts; do
        job "$name" "$layout"
        began=$SECONDS status=0
        timeout --foreground -k 10 900 "${launch[@]}" "$checkout/scripts/wrap.sh" --no-bind --log-dir "$logs/$name-$layout" \
            python -m pytest --with-mpi -p no:cacheprovider --capture=sys --color=no -q --durations=5 "${tests[@]}" \
            ${pytest_options[@]+"${pytest_options[@]}"} >"$logs/$name-$layout.log" 2>&1 </dev/null || status=$?
        record "$name-$layout" $((SECONDS - began)) "$status"
    done
    began=$SECONDS status=0 selected=(${pytest_options[@]+"${pytest_options[@]}"})
    # torchrun uses no MPI: once.
    [ "$name" = "${mpis%% *}" ] || [ ${#selected[@]} != 0 ] || selected=(-k "not torchrun")
    # These wait for most of the time. Shown too, as test_cpu.sh ends what prints nothing.
    timeout --foreground -k 10 1800 python -m pytest -p no:cacheprovider --color=no -q --durations=10 \
        -o faulthandler_timeout=600 tests/hosts \
        ${selected[@]+"${selected[@]}"} 2>&1 </dev/null | tee "$logs/$name-faults.log" || status=$?
    record "$name-faults" $((SECONDS - began)) "$status"
done

# Without an MPI launcher: the processes find each other through a file.
began=$SECONDS status=0 pids=()
for rank in 0 1 2; do
    RANK=$rank WORLD_SIZE=3 STORE=$logs/store timeout -k 10 300 scripts/hosts.sh run "h$((rank % 2))" \
        python tests/jobs/launcherless_program.py >"$logs/launcherless.$rank" 2>&1 </dev/null &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
cat "$logs"/launcherless.? >"$logs/launcherless.log"
[ "$(grep -c 'wrong \[\], hosts 2' "$logs/launcherless.0")" = 3 ] || status=1
record launcherless $((SECONDS - began)) "$status"

say ""
printf '%s\n' "${table[@]}" | tee "$logs/table.txt"
[ "$num_failed" = 0 ]
