#!/usr/bin/env bash
# A private Slurm cluster on one machine, for tests: its nodes are hosts made by scripts/hosts.sh.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: scripts/slurm.sh COMMAND

  up N         start slurmctld, munged and N nodes, h0 to h<N-1>, with one slurmd each
  run CMD...   run a Slurm command, or a program that runs some: scripts/slurm.sh run sbatch job.sh
  down         remove everything
  -h, --help   this text

The nodes have two CPUs and two GPUs that are no devices (/dev/null, /dev/zero), for tests of --gres.
State: SLURM_STATE (default /run/torchmpi-slurm). No other Slurm on this machine is used or changed.

Needs root with CAP_SYS_ADMIN and, of Debian, the packages slurmctld slurmd slurm-client munge iproute2, and libpmix-dev for
srun --mpi=pmix. Folders under /tmp that the nodes share, such as that of an environment: HOSTS_SHARE, a list separated by colons.
HELP
}

here=$(readlink -f "${BASH_SOURCE[0]}")
hosts=${here%/*}/hosts.sh
state=${SLURM_STATE:-/run/torchmpi-slurm}
export HOSTS_STATE=$state/hosts HOSTS_PREFIX=tslurm HOSTS_NETWORK=10.87.22
fail() {
    printf 'slurm.sh: %s\n' "$*" >&2
    exit 1
}

configure() {
    local number=$1
    cat >"$state/slurm.conf" <<CONF
ClusterName=torchmpi
SlurmctldHost=h0($HOSTS_NETWORK.1)
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$state/munge.socket
StateSaveLocation=$state/slurmctld
SlurmdSpoolDir=$state/%n.spool
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/%n.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,bf_interval=5,sched_min_interval=100000
GresTypes=gpu
NodeName=h[0-$((number - 1))] NodeAddr=$HOSTS_NETWORK.[1-$number] CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO
CONF
    # slurmd 22.05 looks for control groups, also if it uses none, unless it is told their kind.
    echo 'CgroupPlugin=cgroup/v1' >"$state/cgroup.conf"
    printf 'Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n' >"$state/gres.conf"
}

up() {
    local number=$1 index
    [[ $number =~ ^[0-9]+$ ]] && [ "$number" -ge 1 ] || fail "up: a number of nodes, not '$number'"
    [ ! -e "$state" ] || fail "the cluster is up already: scripts/slurm.sh down"
    mkdir -p "$state/slurmctld"
    trap 'down' EXIT
    trap 'exit 130' INT TERM
    configure "$number"
    mungekey --create --keyfile="$state/munge.key"
    munged --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munge.pid" \
        --log-file="$state/munge.log" --seed-file="$state/munge.seed"
    HOSTS_SHARE=${HOSTS_SHARE:+$HOSTS_SHARE:}$state "$hosts" up "$number"
    export SLURM_CONF=$state/slurm.conf
    "$hosts" run h0 slurmctld # not on the machine itself, where its port would be open to everybody
    for ((index = 0; index < number; index++)); do
        mkdir "$state/h$index.spool"
        "$hosts" run "h$index" slurmd -N "h$index"
    done
    for ((index = 0; index < 100; index++)); do
        [ "$(sinfo --noheader --Node --states=idle --format=%N | wc -l)" != "$number" ] || break
        sleep 0.1
    done
    [ "$index" -lt 100 ] || fail "the nodes are not ready: $(sinfo --noheader --Node --long)" "logs: $state/*.log"
    trap - EXIT
}

down() {
    local number
    trap '' INT TERM
    "$hosts" down # kills every process of the nodes
    number=$(cat "$state/munge.pid" 2>/dev/null) && kill -9 "$number" 2>/dev/null || true
    rm -rf "$state"
}

command=${1:--h}
[ $# = 0 ] || shift
case $command in
    -h | --help) usage; exit 0 ;;
    up | down) [ "$(id -u)" = 0 ] || fail "needs root, since it makes hosts of namespaces" ;;
    run) [ $# -ge 1 ] || fail "run: a command is missing, see --help" ;;
    *) usage >&2; exit 2 ;;
esac
case $command in
    up)
        for program in slurmctld slurmd srun sbatch munged mungekey ip; do
            PATH=$PATH:/usr/sbin:/sbin type -P "$program" >/dev/null ||
                fail "there is no $program: apt-get install slurmctld slurmd slurm-client munge iproute2"
        done
        PATH=$PATH:/usr/sbin:/sbin up "${1:-2}"
        ;;
    down) PATH=$PATH:/usr/sbin:/sbin down ;;
    run) SLURM_CONF=$state/slurm.conf exec "$@" ;;
esac
