#!/usr/bin/env bash
# The whole test suite on this machine's CPU, under Open MPI and under MPICH, each in its own environment.
set -uo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_cpu.sh [--quick | --complete] [--mpi LIST] [--system] [-k EXPRESSION]

Makes one private environment per MPI under .venv/ (the first time only) and runs ruff, mypy, the unit tests, the
tests that launch jobs, the tests that run on 1, 2, 3 and 4 ranks, and those on several hosts, which are made of network
namespaces (otherwise the reason is printed). Ends with the ten slowest tests, a table with the seconds of each suite and of
its CPU, and one line of sums; the status is 0 only if nothing failed. Full logs: build/test/.

Tests come in three tiers; the times are those of two free cores, once the environments have been made:

  seconds  pytest                        75 seconds: logic, kernels, the model of the protocol; in an environment of .venv
  minutes  scripts/test_cpu.sh --quick   under 3 minutes: core tests on 1, 2 and 3 ranks, some jobs
  all      scripts/test_cpu.sh           about 16 minutes

The limit is 75 minutes, with --complete four hours. A slow suite may use what is left of the limit; a test that hangs fails,
and so does a suite that prints nothing for a quarter of an hour.

  --quick        the second tier: one MPI, or both in turn if both environments are there
  --complete     every test under every MPI and on 1, 2, 3 and 4 ranks, before a release (more than an hour); otherwise a test
                 runs on the numbers of ranks of its marker, one that is the same under every MPI under one of them, and one
                 with the marker release not at all (tests/README.md)
  --mpi LIST     which MPIs, default "openmpi mpich"; system is the one of this machine
  --system       the MPI of this machine too
  -k EXPRESSION  only the tests that match, as in pytest
  -h, --help     this text

Environment: PYTHON, the interpreter to use; VENV_DIR, where the private environments go (default .venv); HOSTFILE, a
file with hosts that have this checkout at the same path: tests/mpi then runs on their ranks, the other tests here;
OMPI_OPTIONS, words for the mpirun of Open MPI, such as "--map-by node" (with --mpi openmpi); TORCH_INDEX, an index that
has PyTorch for this machine (docs/install.md).
As root, kernel.sched_autogroup_enabled is set to 0 until the tests have ended.
HELP
}

time_limit=4500   # seconds for everything; what is left of it limits each suite
silence_limit=900 # seconds without output after which a suite hangs; longer than the limits of tests, which print stacks
mpis="" sizes="1 2 3 4" quick=no complete=no pytest_options=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --quick) quick=yes sizes="1 2 3" ;;
        --complete) complete=yes time_limit=14400; export TORCHMPI_TEST_COMPLETE=1 ;;
        --mpi) mpis=${2:?--mpi wants a list}; shift ;;
        --system) with_system=yes ;;
        -k) pytest_options=(-k "${2:?-k wants an expression}"); shift ;;
        *) fail "unknown option '$1'" "See $0 --help" ;;
    esac
    shift
done
if [ -z "$mpis" ] && [ $quick = yes ]; then
    find_python
    for name in openmpi mpich; do
        environment_ready "$name" dev examples "$name" && mpis+=${mpis:+ }$name
    done
    : "${mpis:=openmpi}"
fi
: "${mpis:=openmpi mpich}"
[ "${with_system:-no}" = no ] || mpis+=" system"
first=${mpis%% *} last=${mpis##* }

logs=$checkout/build/test
table=()
failed_logs=()
suites=()
num_passed=0 num_failed=0 num_skipped=0 sum_cpu=0
columns='%-22s %-7s %6s %6s %7s %8s %6s  %s'

# Whatever takes long runs in the background in a process group of its own and is waited for, so that Ctrl-C and SIGTERM
# end it at once, ranks included. What to signal then: a process, or with a minus a whole group.
running=()

# start COMMAND...: sets `started` to the id of the process and of its group.
start() {
    set -m
    "$@" </dev/null &
    started=$!
    set +m
}

end_all() {
    [ ${#running[@]} = 0 ] || kill -- "${running[@]}" 2>/dev/null
    wait
    printf '\ninterrupted\n'
    exit 130
}
trap end_all INT TERM

# Tests call mpi4py themselves, and ranks of MPICH that poll there keep others from their cores if Linux divides the cores
# between sessions (docs/sharp-bits.md, "One share of the cores for all ranks"): tests of seconds then take minutes.
autogroup=/proc/sys/kernel/sched_autogroup_enabled
turn_autogroups_off() {
    if [ "$(cat "$autogroup" 2>/dev/null)" = 1 ] && { echo 0 >"$autogroup"; } 2>/dev/null; then
        trap 'echo 1 >"$autogroup"' EXIT
        say "kernel.sched_autogroup_enabled is 0 until the tests have ended."
    fi
}

# ---- environments ------------------------------------------------------------------------------------------------

# extras_of NAME: sets `extras` to those of an environment. Only the first MPI runs the programs of other libraries and
# the notebook, and builds the documentation, unless every MPI runs every test.
extras_of() {
    extras=(dev examples "$1")
    [ $quick = no ] || return 0
    if [ "$1" = "$first" ] || [ $complete = yes ]; then
        extras+=(frameworks docs notebook)
    fi
}

# install_environment NAME EXTRA...: may run for several at once. The builds of torchmpi take turns, as they write into the
# checkout.
turn=$environments/building
install_environment() {
    local status=0
    install_requirements "$@" || return
    until mkdir "$turn" 2>/dev/null; do
        sleep 0.2
    done
    install_checkout "$@" || status=$?
    rmdir "$turn"
    return $status
}

# What is being installed: "NAME PROCESS" for each environment.
installing=()

begin_installing() {
    local name missing=() extras
    find_python
    for name in $mpis; do
        case $name in
            openmpi | mpich) extras_of "$name"; environment_ready "$name" "${extras[@]}" || missing+=("$name") ;;
            system) prepare_system dev examples || fail "$reason" "Leave out --system, or install an MPI." ;;
            *) fail "unknown MPI '$name'" "Choose from openmpi, mpich, system." ;;
        esac
    done
    rmdir "$turn" 2>/dev/null # of a run that was interrupted
    [ ${#missing[@]} = 0 ] || choose_torch_index
    for name in ${missing[@]+"${missing[@]}"}; do
        extras_of "$name"
        start install_environment "$name" "${extras[@]}"
        installing+=("$name $started") running+=("-$started")
    done
}

# wait_for_environments NAME...: until these are installed.
wait_for_environments() {
    local entry name pid others=()
    for entry in ${installing[@]+"${installing[@]}"}; do
        read -r name pid <<<"$entry"
        case " $* " in
            *" $name "*) wait "$pid" || give_up "the environment $name could not be made (the reason is above)" ;;
            *) others+=("$entry") ;;
        esac
    done
    installing=(${others[@]+"${others[@]}"})
}

# give_up REASON: ends whatever runs, and this script.
give_up() {
    kill -- "${running[@]}" 2>/dev/null
    wait
    fail "FAILED: $1"
}

# ---- running and counting ----------------------------------------------------------------------------------------

# outcome WORD LOG: how many tests the last line of pytest's report in LOG counts as WORD (passed, failed, ...).
outcome() {
    grep -aE '(passed|failed|skipped|errors?|xfailed|xpassed|deselected|no tests ran).* in [0-9.]+s' "$2" | tail -n 1 |
        grep -oE "[0-9]+ $1" | head -n 1 | cut -d ' ' -f 1 | grep . || echo 0
}

# record NAME STATUS SECONDS PASSED FAILED SKIPPED [NOTE]
record() {
    local cpu
    cpu=$(cut -d ' ' -f 1 "$logs/$1.cpu" 2>/dev/null || echo 0) # none of a suite that was killed
    sum_cpu=$((sum_cpu + cpu))
    [ "$4" = 0 ] || [ ${#pytest_options[@]} -gt 0 ] || printf '%s %s\n' "$1" "$3" >>"$durations"
    # shellcheck disable=SC2059 # columns are a format
    table+=("$(printf "$columns" "$1" "$([ "$5" = 0 ] && echo ok || echo FAILED)" "$4" "$5" "$6" "$3" "$cpu" "${7:-}")")
    num_passed=$((num_passed + $4)) num_failed=$((num_failed + $5)) num_skipped=$((num_skipped + $6))
    [ "$5" = 0 ] || failed_logs+=("$logs/$1.log")
    suites+=("$1")
}

# begin NAME COMMAND...: start a suite, with its output in a log; several may run at once. With `after`, the name of another
# suite, it waits for the end of that one. A check without counts is one test. $durations has the seconds of each suite in
# the last run.
after=""
begin() {
    local name=$1 kind=check before
    shift
    : >"$logs/$name.log"
    rm -f "$logs/$name".{begun,ended,cpu}
    if [ $((time_limit - SECONDS)) -lt 5 ]; then
        record "$name" 124 0 0 1 0 "not run: the $time_limit seconds for the whole suite are over"
        return
    fi
    before=$(awk -v name="$name" '$1 == name { seconds = $2 } END { print seconds }' "$durations" 2>/dev/null)
    printf '\n== %s%s%s: %s\n' "$name" "${before:+ ($before s in the last run)}" "${after:+, after $after}" "$*"
    case " $* " in *" pytest "* | *test_hosts.sh*) kind=pytest ;; esac
    start run_after "$after" "$name" "$@" >"$logs/$name.log" 2>&1
    running+=("$started")
    begun+=("$name $started $kind")
    watch "$started" "$logs/$name" &
}

# run_after OTHER NAME COMMAND...: the command, once the suite OTHER has ended; at once if that is ''.
run_after() {
    local other=$1 name=$2
    shift 2
    until [ -z "$other" ] || [ -e "$logs/$other.ended" ]; do
        sleep 1
    done
    : >"$logs/$name.begun"
    [ "$SECONDS" -lt "$time_limit" ] || exit 124
    # INT first: pytest then still reports what it has seen so far. --foreground signals the command once; otherwise its
    # group is signalled too, and Open MPI 4.1's mpirun takes a second SIGTERM for the order to leave at once, without its
    # ranks.
    exec "$VIRTUAL_ENV/bin/python" -I -S "$checkout/scripts/cpu_seconds.py" "$logs/$name.cpu" \
        timeout --foreground -s INT -k 20 "$((time_limit - SECONDS))" "$@"
}

# watch PROCESS LOG: ends a suite that prints nothing. Files beside the log (named without .log) say so to judge(), and tell
# suites that wait that it has ended.
watch() {
    local looks=0
    rm -f "$2.silent"
    while sleep 1 && kill -0 "$1" 2>/dev/null; do
        # Rarely, as it starts processes.
        if [ $((++looks % 20)) = 0 ] && [ -e "$2.begun" ] && [ $(($(date +%s) - $(latest "$2"))) -gt $silence_limit ]; then
            : >"$2.silent"
            kill -INT "$1"
            sleep 20
            kill -KILL -- "-$1" 2>/dev/null
        fi
    done
    : >"$2.ended"
}

# latest LOG: when it has last been written to, or the suite begun.
latest() {
    local log since
    log=$(date -r "$1.log" +%s) since=$(date -r "$1.begun" +%s)
    echo $((log > since ? log : since))
}

# finish [NAME...]: show the suites that were begun, one after the other, and judge them; those of these names continue.
begun=()
finish() {
    local entry name pid kind status follower continued=() processes=()
    for entry in ${begun[@]+"${begun[@]}"}; do
        read -r name pid kind <<<"$entry"
        case " $* " in
            *" $name "*) continued+=("$entry") processes+=("$pid"); continue ;;
        esac
        [ ${#begun[@]} = 1 ] || printf '\n-- %s\n' "$name"
        tail -n +1 -f -s 0.2 --pid="$pid" "$logs/$name.log" &
        follower=$! status=0
        wait "$pid" || status=$?
        wait "$follower"
        # Until its last output, as it may have ended while another was shown.
        judge "$name" "$status" $(($(latest "$logs/$name") - $(date -r "$logs/$name.begun" +%s))) "$kind"
    done
    begun=(${continued[@]+"${continued[@]}"}) running=(${processes[@]+"${processes[@]}"})
}

# judge NAME STATUS SECONDS KIND: what came of a suite, from its status and its log.
judge() {
    local name=$1 status=$2 seconds=$3 kind=$4 log=$logs/$1.log passed failed skipped note=""
    if [ "$kind" = pytest ]; then
        passed=$(($(outcome passed "$log") + $(outcome xfailed "$log")))
        failed=$(($(outcome failed "$log") + $(outcome error "$log")))
        skipped=$(outcome skipped "$log")
    else
        passed=$((status == 0)) failed=$((status != 0)) skipped=0
    fi
    note=$(grep -a -m 1 '^skipped: ' "$log")
    # 5: -k selected nothing here.
    if [ "$status" = 5 ] && [ ${#pytest_options[@]} -gt 0 ]; then
        status=0
    fi
    case $status in
        0) ;;
        124 | 137) note="stopped after $seconds seconds, at the end of the $time_limit for all suites" ;;
        *) note="status $status" ;;
    esac
    [ ! -f "$logs/$name.silent" ] || note="stopped after $seconds seconds: nothing printed for $silence_limit"
    # A crash, a hang or a failure on another rank than 0 leaves no count behind.
    if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
        failed=1
    fi
    record "$name" "$status" "$seconds" "$passed" "$failed" "$skipped" "$note"
}

# how_it_ended LOG: the last lines of a suite, and the messages of torchmpi on its ranks.
how_it_ended() {
    tail -n 3 "$1"
    grep -arE -A 6 'torchmpi: .*(waited|failed|ends the job)' "${1%.log}" 2>/dev/null | tail -n 60
}

# pytest_suite NAME TEST...: in this process. The limits of jobs are shorter: one that takes too long fails its test and not
# the suite.
pytest_suite() {
    local name=$1
    shift
    begin "$name" python -m pytest --color=no -q --durations=25 -o faulthandler_timeout=600 "$@" \
        ${pytest_options[@]+"${pytest_options[@]}"}
}

# share_of_ranks NAME RANKS: sets `only` to the options that select the tests of an MPI in tests/mpi; false if it has none.
# Of two MPIs, the last runs its tests on two ranks, and on three what depends on the MPI; the first on the other numbers: waiting
# ranks of MPICH occupy the cores that others need. A third MPI, between them, runs what depends on the MPI.
share_of_ranks() {
    local marks=""
    only=()
    if [ $quick = yes ]; then
        marks="quick and "
    elif [ $complete = yes ]; then
        return 0
    fi
    if [ "$first" != "$last" ]; then
        case $1-$2 in
            "$last-2") ;;
            "$last-3") marks+="not any_mpi and " ;;
            "$last-"* | "$first-2") return 1 ;;
            "$first-"*) ;;
            *) marks+="not any_mpi and " ;;
        esac
    fi
    only=(-m "${marks}n$2")
}

# Files of tests/jobs that do not depend on the MPI, or have tests in tests/mpi that run under every MPI: two suites of their
# own, so that three rows of suites end at about the same time.
programs=(tests/jobs/test_{async_sgd,distributed_{frameworks,support},docs,kernel_builds,launcherless}.py
    tests/jobs/test_{notebook,recovery,site,timeline,warm}.py)
examples=(tests/jobs/test_{bench,examples,llm_examples,scripts,single_file_examples,slow_links,torch_suite}.py)

# share_of_jobs NAME: the same for tests/jobs.
share_of_jobs() {
    only=()
    [ $complete = no ] || return 0
    only=("${programs[@]/#/--ignore=}" "${examples[@]/#/--ignore=}")
    [ "$1" = "$last" ] || only+=(-m "not any_mpi")
}

# beside_ranks ROW NAME COMMAND...: begin the suite NAME, with a command that begins it, after the last one in a row.
rows=("" "" unit)
beside_ranks() {
    local row=$1 name=$2
    shift 2
    after=${rows[row]}
    "$@"
    after="" rows[row]=$name beside+=" $name"
}

# jobs_suite ROW MPI: tests/jobs, in a row.
jobs_suite() {
    use_environment "$2"
    share_of_jobs "$2"
    beside_ranks "$1" "$2-jobs" pytest_suite "$2-jobs" tests/jobs ${only[@]+"${only[@]}"}
}

# Ranks are forked from one process that has imported torch; not on other hosts.
warm=(python "$checkout/tests/helpers/warm.py" pytest torch.distributed.checkpoint --)
[ -z "${HOSTFILE:-}" ] || warm=()

# mpi_suites RANKS MPI...: tests/mpi on that many ranks; rank 0 in full, the others only if something failed. With
# --capture=sys a rank that ends the job can still say why.
mpi_suites() {
    local ranks=$1 num_failures=${#failed_logs[@]} name log
    shift
    for name in "$@"; do
        share_of_ranks "$name" "$ranks" || continue
        rm -rf "${logs:?}/$name-n$ranks"
        use_environment "$name"
        launch_command "$ranks"
        begin "$name-n$ranks" ${warm[@]+"${warm[@]}"} "${launch[@]}" "$checkout/scripts/wrap.sh" --no-bind \
            --log-dir "$logs/$name-n$ranks" \
            python -m pytest --with-mpi -p no:cacheprovider --capture=sys --color=no -q --durations=10 tests/mpi \
            ${only[@]+"${only[@]}"} ${pytest_options[@]+"${pytest_options[@]}"}
    done
    # shellcheck disable=SC2086 # a list of words
    finish $beside
    for log in ${failed_logs[@]+"${failed_logs[@]:num_failures}"}; do
        for log in "${log%.log}"/rank[1-9]*.log; do
            [ -f "$log" ] && printf '\n-- the end of %s\n' "$log" && tail -n 40 "$log"
        done
    done
}

# ---- the run -----------------------------------------------------------------------------------------------------

cd "$checkout" || exit 1
export PYTHONUNBUFFERED=1 # so that the log of a killed suite is complete
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules
export OMP_WAIT_POLICY=passive # threads of torch that wait for each other leave their cores to other suites
mkdir -p "$logs" || fail "FAILED: cannot write to $logs" "Work in a copy of the checkout that belongs to you."
durations=$logs/durations
usual="about 16 minutes"
[ $quick = no ] || usual="under 3 minutes"
[ $complete = no ] || usual="more than an hour"
say "On two free cores this takes $usual; after $((time_limit / 60)) minutes it is ended."
begin_installing
turn_autogroups_off
# The last environment has the fewest packages, and is there while others are still being installed.
wait_for_environments "$last"
use_environment "$last"
# One process each: these run side by side, with the tests on one rank.
begin lint python -m ruff check --output-format concise .
# Beside all others, in the time that these sleep or wait.
if [ $quick = yes ]; then
    # shellcheck disable=SC2086 # a list of words
    wait_for_environments $mpis
    use_environment "$first"
    beside=jobs
    pytest_suite jobs tests/jobs -m quick
else
    beside=unit
    begin types python -m mypy # the unit tests use its cache in the end
    pytest_suite unit tests/unit tests/security tests/test_architecture.py
fi
# shellcheck disable=SC2086 # a list of words
wait_for_environments $mpis
# The ranks of tests/mpi compute for most of the time. Beside them three rows of suites, of which most jobs wait for most of the
# time, the longest first in each row, so that both cores have work until the end. The third row begins with the unit tests.
if [ $quick = no ]; then
    if [ "$first" != system ]; then
        use_environment "$first"
        beside_ranks 0 hosts begin hosts "$checkout/scripts/test_hosts.sh" --faults --mpi "$first" \
            ${pytest_options[@]+"${pytest_options[@]}"}
    fi
    for name in $mpis; do
        [ "$name" = "$first" ] || jobs_suite 1 "$name"
    done
    use_environment "$first"
    if [ $complete = no ]; then
        beside_ranks 2 programs pytest_suite programs "${programs[@]}"
        beside_ranks 1 examples pytest_suite examples "${examples[@]}"
    fi
    jobs_suite 0 "$first"
fi
for ranks in $sizes; do
    if [ "$ranks" = 1 ]; then
        # shellcheck disable=SC2086 # a list of words
        mpi_suites 1 $mpis
    else
        for name in $mpis; do
            mpi_suites "$ranks" "$name"
        done
    fi
done
finish

if [ ${#failed_logs[@]} -gt 0 ]; then
    printf '\n== failures (full logs: %s)\n' "$logs"
    for log in "${failed_logs[@]}"; do
        # The report of pytest on each failed test; otherwise the end of the output, and the messages of torchmpi with their
        # ranks.
        sed "s|^|$(basename "$log" .log): |; \$a\\" < <(grep -aE '^(FAILED|ERROR) ' "$log" || how_it_ended "$log")
    done
fi
printf '\n== the slowest ten\n'
for name in "${suites[@]}"; do
    grep -aE '^[0-9.]+s (call|setup|teardown) ' "$logs/$name.log" | sed "s|\$| ($name)|"
done | sort -rn | head -n 10
say ""
# shellcheck disable=SC2059 # columns are a format
printf "$columns\n" suite result passed failed skipped seconds cpu ""
printf '%s\n' "${table[@]}"
say "$num_passed passed, $num_failed failed, $num_skipped skipped; $sum_cpu seconds of CPU"
[ "$num_failed" = 0 ]
