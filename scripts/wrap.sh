#!/usr/bin/env bash
# Stands between mpirun and a program: gives each rank of a host its own cores, one GPU and a log file.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: mpirun -n RANKS scripts/wrap.sh [--bind|--no-bind] [--gpu] [--log-dir DIR] COMMAND [ARGUMENT...]

  --bind        (default) give each rank of this host an equal share of the cores, hardware threads of one core
                together; leaves a rank alone that the launcher has bound already, or where ranks outnumber cores
  --no-bind     leave the cores to the launcher and to torchmpi
  --gpu         show each rank one GPU: local rank modulo the GPUs listed in CUDA_VISIBLE_DEVICES or by nvidia-smi
  --log-dir DIR write the output of rank N to DIR/rankN.log; rank 0 goes to the terminal as well
  -h, --help    this text

Environment: LOG_TO_FILE=1 writes the output of each rank to /tmp/mpi_<local rank> instead, unless --log-dir is given.
COMMAND gets MPI_MY_NODE, the name of this host, and MPI_NODES, the lines of the file HOSTFILE or this host.

Works under Open MPI, MPICH, Intel MPI, MVAPICH, PALS, Flux and Slurm's srun; alone it is rank 0 of 1.
WRAP_DRY_RUN=1 prints what each rank would get instead of running the command.
HELP
}

note() {
    printf 'wrap.sh: rank %s: %s\n' "$rank" "$*" >&2
}

refuse() {
    printf 'wrap.sh: %s (see scripts/wrap.sh --help)\n' "$*" >&2
    exit 2
}

# first NAME...: the value of the first of these variables that is set to a number.
first() {
    local name
    for name; do
        if [[ ${!name:-} =~ ^[0-9]+$ ]]; then
            printf '%s' "${!name}"
            return
        fi
    done
    return 1
}

# Slurm lists the ranks of each host as in "4(x2),3"; prints the entry of this host.
slurm_local_size() {
    local entry count=0
    for entry in ${SLURM_STEP_TASKS_PER_NODE//,/ }; do
        if [[ $entry =~ ^([0-9]+)(\(x([0-9]+)\))?$ ]]; then
            count=$((count + ${BASH_REMATCH[3]:-1}))
            if [ "${SLURM_NODEID:-0}" -lt "$count" ]; then
                printf '%s' "${BASH_REMATCH[1]}"
                return
            fi
        fi
    done
    return 1
}

# Sets rank, local_rank and local_size. Slurm comes last: inside a batch job its variables describe the job script,
# and an mpirun started there sets its own besides.
find_rank() {
    rank=$(first OMPI_COMM_WORLD_RANK PMI_RANK MV2_COMM_WORLD_RANK PALS_RANKID FLUX_TASK_RANK PMIX_RANK SLURM_PROCID) || rank=0
    if local_rank=$(first OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID MV2_COMM_WORLD_LOCAL_RANK PALS_LOCAL_RANKID FLUX_TASK_LOCAL_ID); then
        local_size=$(first OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS MV2_COMM_WORLD_LOCAL_SIZE PALS_LOCAL_SIZE) || local_size=
    elif local_rank=$(first SLURM_LOCALID); then
        local_size=$(slurm_local_size) || local_size=
    elif [ "$(first PMI_SIZE PMIX_SIZE || echo 1)" = 1 ] && [ -z "${PMIX_RANK:-}" ]; then
        local_rank=0 local_size=1
    else
        local_rank='' local_size=''
    fi
}

# allowed_cores PID: the cores that process may use, one per line.
allowed_cores() {
    local range
    for range in $(taskset -cp "$1" 2>/dev/null | sed 's/.*: //; s/,/ /g'); do
        seq "${range%-*}" "${range#*-}"
    done
}

# The same in the order package, core, hardware thread, so that an equal share keeps what belongs together.
sorted_cores() {
    local core topology
    for core in $(allowed_cores $$); do
        topology=/sys/devices/system/cpu/cpu$core/topology
        printf '%s %s %s\n' "$(cat "$topology/physical_package_id" 2>/dev/null || echo 0)" \
            "$(cat "$topology/core_id" 2>/dev/null || echo "$core")" "$core"
    done | sort -n -k 1,1 -k 2,2 -k 3,3 | cut -d ' ' -f 3
}

# Sets `cores` to this rank's share, or leaves it empty and sets `why`.
choose_cores() {
    local all begin end
    if ! command -v taskset >/dev/null; then
        why="taskset is not installed; torchmpi binds its ranks itself"
    elif [ -z "$local_rank" ] || [ -z "$local_size" ]; then
        why="the launcher does not tell the number of ranks on this host"
    elif [ "$(allowed_cores $$)" != "$(allowed_cores "$PPID")" ]; then
        why="the launcher has bound this rank already"
    else
        mapfile -t all < <(sorted_cores)
        if [ "$local_size" -gt "${#all[@]}" ]; then
            why="$local_size ranks share ${#all[@]} cores"
        else
            begin=$((local_rank * ${#all[@]} / local_size)) end=$(((local_rank + 1) * ${#all[@]} / local_size))
            cores=$(IFS=,; echo "${all[*]:begin:end-begin}")
        fi
    fi
}

# Sets `gpu` to this rank's entry of the GPUs that can be seen here.
choose_gpu() {
    local all
    [ -n "$local_rank" ] || refuse "--gpu: the launcher does not tell the rank within the host"
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        IFS=, read -r -a all <<<"$CUDA_VISIBLE_DEVICES"
    else
        mapfile -t all < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)
    fi
    if [ ${#all[@]} -gt 0 ]; then
        gpu=${all[local_rank % ${#all[@]}]}
    elif [ "$local_rank" = 0 ]; then
        note "--gpu: no GPU can be seen here"
    fi
}

bind=yes want_gpu=no log_dir=
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --bind) bind=yes ;;
        --no-bind) bind=no ;;
        --gpu) want_gpu=yes ;;
        --log-dir) [ $# -gt 1 ] || refuse "--log-dir needs a directory"; log_dir=$2; shift ;;
        --) shift; break ;;
        -*) refuse "unknown option '$1'" ;;
        *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || refuse "no command to run"
[ -z "${NVPROF:-}" ] || refuse "NVPROF is set, but nvprof is no more: unset it and wrap nsys, as in 'wrap.sh nsys profile COMMAND'"
[ "${1##*/}" != mpirun ] || refuse "mpirun comes first: mpirun -n 2 scripts/wrap.sh COMMAND"

find_rank
cores='' gpu='' why=''
if [ $bind = yes ]; then
    choose_cores
    if [ -n "$why" ] && [ "${local_rank:-0}" = 0 ]; then
        note "cores left as they are: $why"
    fi
fi
if [ $want_gpu = yes ]; then
    choose_gpu
    if [ -n "$gpu" ]; then
        export CUDA_VISIBLE_DEVICES=$gpu
    fi
fi
if [ -n "$cores" ]; then
    set -- taskset -c "$cores" "$@"
fi
if [ -n "${WRAP_DRY_RUN:-}" ]; then
    printf 'rank %s local %s of %s cores %s gpu %s:%s\n' "$rank" "${local_rank:-?}" "${local_size:-?}" "${cores:-any}" "${gpu:-any}" \
        "$(printf ' %q' "$@")"
    exit 0
fi
MPI_MY_NODE=$(uname -n) MPI_NODES=$(uname -n)
if [ -n "${HOSTFILE:-}" ]; then
    MPI_NODES=$(cat "$HOSTFILE") || refuse "HOSTFILE=$HOSTFILE cannot be read"
fi
export MPI_MY_NODE MPI_NODES
if [ -n "$log_dir" ]; then
    mkdir -p "$log_dir" || refuse "cannot make the directory $log_dir"
    if [ "$rank" = 0 ]; then
        exec > >(exec tee "$log_dir/rank0.log") 2>&1
    else
        exec >"$log_dir/rank$rank.log" 2>&1
    fi
elif [ -n "${LOG_TO_FILE:-}" ]; then
    log=/tmp/mpi_${local_rank:-$rank}
    rm -f "$log" 2>/dev/null && exec >"$log" 2>&1 || refuse "LOG_TO_FILE: cannot write $log, the file of another user?"
fi
exec "$@"
