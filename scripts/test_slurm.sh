#!/usr/bin/env bash
# The examples of examples/slurm on a private Slurm cluster of two nodes on this machine, under both MPIs and without one.
set -uo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_slurm.sh [--mpi LIST]

Makes a cluster with scripts/slurm.sh, runs the job scripts of examples/slurm on it, checks their results, and removes it.
Ends with a table; the status is 0 only if nothing failed. Full logs: build/slurm/.

  --mpi LIST   which MPIs, default "openmpi mpich none"; none: srun --mpi=none
  -h, --help   this text

Skipped, with status 0 and the reason, without root or without Slurm (Debian: apt-get install slurmctld slurmd slurm-client
munge libpmix-dev iproute2).
HELP
}

mpis="openmpi mpich none"
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --mpi) mpis=${2:?--mpi wants a list}; shift ;;
        *) fail "unknown option '$1'" "See $0 --help" ;;
    esac
    shift
done

skip() {
    say "skipped: $*"
    exit 0
}
[ "$(id -u)" = 0 ] || skip "the nodes are hosts made of namespaces, which needs root"
for program in slurmctld slurmd srun munged ip; do
    PATH=$PATH:/usr/sbin type -P "$program" >/dev/null || skip "there is no $program, see --help"
done
unshare --net --mount true 2>/dev/null || skip "this root may not make namespaces (CAP_SYS_ADMIN)"

cd "$checkout" || exit 1
logs=$checkout/build/slurm
table=() num_failed=0
find_python
rm -rf "$logs" && mkdir -p "$logs" || fail "cannot write to $logs"
for name in ${mpis/none/openmpi}; do
    prepare_environment "$name" dev examples "$name" || exit 1
done
export SLURM_STATE=${SLURM_STATE:-/run/torchmpi-slurm} HOSTS_SHARE=$environments PYTHONUNBUFFERED=1
trap 'trap "" INT TERM; scripts/slurm.sh down' EXIT # not interrupted: timeout signals twice
trap 'exit 130' INT TERM
scripts/slurm.sh up 2 || exit 1
export SLURM_CONF=$SLURM_STATE/slurm.conf

# record NAME SECONDS PROBLEM
record() {
    local result=ok
    if [ -n "$3" ]; then
        result=FAILED num_failed=$((num_failed + 1))
        tail -n 20 "$logs/$1".* 2>/dev/null
    fi
    table+=("$(printf '%-22s %-7s %4s s  %s' "$1" "$result" "$2" "$3")")
    say "${table[-1]}"
}

# finished LOG TEXT...: the problem of a job whose output lacks one of the texts; '' if it has all.
finished() {
    local log=$1 text
    shift
    for text; do
        grep -qE -- "$text" "$log" || { echo "no '$text' in $log"; return; }
    done
}

# batch NAME SCRIPT TEXT... [-- OPTION...]: submits a job script, waits, and looks for the texts in its output.
batch() {
    local name=$1 script=$2 began=$SECONDS texts=() problem job
    shift 2
    while [ $# -gt 0 ] && [ "$1" != -- ]; do texts+=("$1"); shift; done
    [ $# = 0 ] || shift
    # sbatch --wait looks for the end of the job less and less often.
    job=$(sbatch --parsable --output "$logs/$name.%a.log" "$@" "examples/slurm/$script" 2>"$logs/$name.sbatch")
    while [ -n "$(squeue --noheader --jobs "$job" 2>/dev/null)" ] && [ $((SECONDS - began)) -lt 240 ]; do
        sleep 0.5
    done
    cat "$logs/$name".*.log >"$logs/$name.all" 2>/dev/null
    problem=$(finished "$logs/$name.all" "${texts[@]}")
    record "$name" $((SECONDS - began)) "$problem"
}

whole='2 ranks, 120 updates, error [01]\.[0-9] %, parameters'
for name in ${mpis/none/}; do
    use_environment "$name"
    interface=pmix other=pmi2
    [ "$name" = openmpi ] || interface=pmi2 other=pmix
    export MPI=$interface
    batch "$name-srun" srun.sh 'ranks on 2 hosts' "$whole"
    batch "$name-mpirun" mpirun.sh 'ranks on 2 hosts' "$whole"
    batch "$name-array" array.sh '1 ranks, 120 updates' -- --array=0-1
    batch "$name-steps" steps.sh 'ranks on 2 hosts' "$whole"
    batch "$name-gpus" gpus.sh 'ranks on 2 hosts' '4 ranks, 120 updates'

    # Refused, and not two trainings of one rank each. MPICH ends by itself under pmix.
    began=$SECONDS status=0
    timeout -k 5 60 srun --mpi="$other" --nodes=2 --ntasks=2 python examples/slurm/train.py --folder "$logs/$name-refused" \
        >"$logs/$name-refused.log" 2>&1 || status=$?
    problem=$(finished "$logs/$name-refused.log" "Slurm's srun started 2 processes|unsupported PMI version")
    [ "$status" != 0 ] || problem="status 0"
    record "$name-refused" $((SECONDS - began)) "$problem"

    # The whole job ends, and with it every process.
    began=$SECONDS
    job=$(sbatch --parsable --output "$logs/$name-scancel.log" examples/slurm/srun.sh --step-seconds 1)
    for _ in $(seq 300); do
        ! grep -q 'ranks on 2 hosts' "$logs/$name-scancel.log" 2>/dev/null || break
        sleep 0.1
    done
    scancel "$job"
    for _ in $(seq 150); do
        pids=$(pgrep -f "runs/$job( |$)" || true)
        [ -n "$pids" ] || break
        sleep 0.1
    done
    problem=$(finished "$logs/$name-scancel.log" 'ranks on 2 hosts' 'SIGTERM|CANCELLED')
    record "$name-scancel" $((SECONDS - began)) "$problem${pids:+ left: $pids}"
done

# Without PMI: the ranks find each other by themselves.
without_pmi() {
    local began job expected
    use_environment openmpi
    export MPI=none

    # The GPUs that Slurm binds to the ranks, which are no devices here: --gres as in gpus.sh, and one for each task.
    began=$SECONDS
    # shellcheck disable=SC2016
    for option in --gres=gpu:2 --gpus-per-task=1; do
        srun --nodes=2 --ntasks=4 --ntasks-per-node=2 "$option" bash -c 'echo "$0: local rank $SLURM_LOCALID sees $CUDA_VISIBLE_DEVICES"' \
            "$option"
    done >"$logs/none-gres.log" 2>&1
    record none-gres $((SECONDS - began)) "$(finished "$logs/none-gres.log" \
        'gres=gpu:2: local rank 0 sees 0,1' 'gres=gpu:2: local rank 1 sees 0,1' 'task=1: local rank 0 sees 0$' 'task=1: local rank 1 sees 1$')"

    batch none-srun srun.sh 'torchmpi messages' 'ranks on 2 hosts' "$whole"
    batch none-steps steps.sh 'torchmpi messages' "$whole"

    # The signal before the time limit, a checkpoint, and the same job again: the parameters are those of the first run.
    began=$SECONDS
    job=$(sbatch --parsable --time=2 --signal=USR1@50 --output "$logs/requeue.log" examples/slurm/requeue.sh --step-seconds 0.6)
    for _ in $(seq 400); do
        ! grep -q 'parameters' "$logs/requeue.log" 2>/dev/null || break
        scontrol update "JobId=$job" StartTime=now 2>/dev/null || true # Slurm waits for two minutes before it starts it again
        sleep 1
    done
    scancel "$job"
    expected=$(grep -ho 'parameters [0-9a-f]*' "$logs/none-srun.all")
    record requeue $((SECONDS - began)) "$(finished "$logs/requeue.log" 'stopped after [0-9]+ updates' "${expected:-no parameters}")"
}
case " $mpis " in *" none "*) without_pmi ;; esac

rm -rf "$checkout/runs"
say ""
printf '%s\n' "${table[@]}"

# The lines of results/places.md.
say ""
for name in $mpis; do
    if [ "$name" = none ]; then
        version="no MPI library"
    else
        use_environment "$name"
        version=$(python -c 'from torchmpi.launch import mpi_library; print(mpi_library.short_version(mpi_library.load()))')
    fi
    checks=$(printf '%s\n' "${table[@]}" | awk -v start="$name-" '
        index($1, start) == 1 || (start == "none-" && $1 == "requeue") {
            sub(start, "", $1); printf "%s%s%s", separator, $1, ($2 == "ok" ? "" : " (failed)"); separator = ", "
        }')
    case $checks in *failed*) result=failed ;; *) result=passed ;; esac
    say "| slurm-$name | $(srun --version), $version | $checks | $result | \`scripts/test_slurm.sh --mpi $name\` |"
done
[ "$num_failed" = 0 ]
