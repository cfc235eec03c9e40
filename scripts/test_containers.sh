#!/usr/bin/env bash
# What containers, homes and other users do to a job, imitated with namespaces, limits and users on this machine.
set -uo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_containers.sh [--mpi LIST] [--only CHECKS] [PLACE...]

Runs scripts/check_place.py in places that differ from a plain machine as containers or shared machines do, and prints a line
for each. Logs: build/containers/. The status is 0 only if all passed.

  small-shm    /dev/shm with 64 MB, the default of container runtimes
  read-only    a root file system and a home that cannot be written, temporary files excepted
  no-home      a user without a name and without a home directory
  one-core     both ranks on one core, as with a cpuset
  quota        half a core of processor time by cgroup, with all cores visible
  apart        each rank in a container of its own under the same host name: no common process ids, /dev/shm or IPC
  pairs        two such containers with two ranks each
  read-only-home  a user whose home cannot be written
  no-locks     a home on a file system without locks: flock() fails; the kernels are compiled anew
  slow-files   each open() of a file takes 2 ms longer, as on a network file system; the kernels are compiled anew
  two-users    two users with a job each at the same time
  --mpi LIST   which MPIs, default "openmpi mpich"
  --only LIST  checks of check_place.py, default "start,DDP,parameter server,kill"
  -h, --help   this text

Skipped, with status 0 and the reason, without root or without the command unshare. no-locks and slow-files need strace.
HELP
}

mpis="openmpi mpich" places=() only="start,DDP,parameter server,kill"
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --mpi) mpis=${2:?--mpi wants a list}; shift ;;
        --only) only=${2:?--only wants a list}; shift ;;
        -*) fail "unknown option '$1'" "See $0 --help" ;;
        *) places+=("$1") ;;
    esac
    shift
done
[ ${#places[@]} != 0 ] || places=(small-shm read-only no-home one-core quota apart pairs read-only-home no-locks slow-files two-users)
skip() {
    say "skipped: $*"
    exit 0
}
[ "$(id -u)" = 0 ] || skip "containers are imitated with namespaces, which needs root"
type -P unshare >/dev/null || skip "there is no command unshare (package util-linux)"
unshare --mount true 2>/dev/null || skip "this root may not make namespaces (CAP_SYS_ADMIN)"

cd "$checkout" || exit 1
logs=$checkout/build/containers
mkdir -p "$logs" && chmod 1777 "$logs" || fail "cannot write to $logs"
find_python

# A rank in a container of its own; the host name and the network are those of this machine.
cat >"$logs/container" <<'SCRIPT'
#!/usr/bin/env bash
exec unshare --mount --pid --ipc --fork --kill-child --mount-proc bash -c '
mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm
"$@" # not exec: the first process of a container cannot kill itself
exit $?' container "$@"
SCRIPT
# pair FOLDER COMMAND...: a rank in the first or the second container, by its number.
cat >"$logs/pair" <<'SCRIPT'
#!/usr/bin/env bash
folder=$1
shift
number=$((${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}} / 2))
exec nsenter -t "$(cat "$folder/container$number")" -m -p -i --wd="$PWD" -- "$@"
SCRIPT
chmod +x "$logs/container" "$logs/pair"

pairs_program='
import torch, torchmpi as mpi
from torchmpi.session import runtime
mpi.start()
total = mpi.allreduce(torch.arange(100000.0) + mpi.rank())
right = torch.equal(total, 4 * torch.arange(100000.0) + 6)
print("rank", mpi.rank(), "right" if right else "wrong", "hosts", runtime.current().num_hosts, flush=True)
'

# pairs NAME: four ranks, two in each of two containers.
pairs() {
    local index pid keepers=() status=0
    for index in 0 1; do
        unshare --mount --pid --ipc --fork --kill-child --mount-proc bash -c '
            mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm && echo ready >"$0" && exec sleep 600' \
            "$logs/ready$index" </dev/null >/dev/null 2>&1 &
        keepers+=($!)
        for _ in $(seq 100); do [ -e "$logs/ready$index" ] && break; sleep 0.05; done
        pid=$(tr -d ' ' <"/proc/${keepers[-1]}/task/${keepers[-1]}/children")
        echo "$pid" >"$logs/container$index"
        rm -f "$logs/ready$index"
    done
    launch_command 4
    timeout -k 5 120 "${launch[@]}" "$logs/pair" "$logs" python -c "$pairs_program" >"$logs/$1.log" 2>&1 </dev/null || status=$?
    kill -9 "${keepers[@]}" # unshare ignores SIGTERM
    wait "${keepers[@]}" 2>/dev/null
    [ "$status" = 0 ] && [ "$(grep -c 'right hosts 2' "$logs/$1.log")" = 4 ] || status=1
    printf '| %s | 4 ranks | start, allreduce, two hosts found | %s | `scripts/test_containers.sh pairs` |\n' "$1" \
        "$([ "$status" = 0 ] && echo passed || echo FAILED)"
    return $status
}

not_run() {
    say "| $1 | | not run: $2 | | |"
}

# user NUMBER HOME [COMMAND]: sets `inside` to the command that starts a program as that user, after a command of root.
user() {
    inside=(unshare --mount bash -c "$(python_for_users) && ${3:-true} && exec \"\$@\"" user
        setpriv --reuid "$1" --regid "$1" --clear-groups env HOME="$2" TMPDIR="$logs")
}

# traced NAME EXPRESSION...: sets `options` so that strace changes the system calls of the ranks, and the cache is empty.
traced() {
    local word words="strace -f -qq -o /dev/null --seccomp-bpf"
    type -P strace >/dev/null || return 1
    for word in "${@:2}"; do words+=" -e $word"; done
    rm -rf "$logs/cache-$1"
    export NUMBA_CACHE_DIR=$logs/cache-$1
    options=(--rank-command "$words")
}

# checks NAME LOGS PLACE [OPTION...]: runs check_place.py through the command in `inside`.
checks() {
    ${inside[@]+"${inside[@]}"} python scripts/check_place.py --place "$1" --logs "$2" \
        --only "$only" --command "scripts/test_containers.sh $3" "${@:4}" 2>&1 </dev/null
}

# two_users NAME: one line for two jobs at the same time; that of a job that failed, if one did.
two_users() {
    local number pids=() failed=0
    for number in 1 2; do
        mkdir -p "$logs/home$number" && chown $((54320 + number)) "$logs/home$number"
        user $((54320 + number)) "$logs/home$number"
        checks "$1" "$logs/$1-$number" two-users >"$logs/$1.$number" &
        pids+=($!)
    done
    wait "${pids[0]}" || failed=1
    wait "${pids[1]}" || failed=2
    cat "$logs/$1.$((failed == 0 ? 1 : failed))"
    [ $failed = 0 ]
}

# place PLACE MPI: one line of the table.
place() {
    local name=$1-$2 inside=() options=() group
    case $1 in
        small-shm) inside=(unshare --mount bash -c 'mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm && exec "$@"' place) ;;
        read-only)
            mkdir -p "$logs/tmp"
            # A mount of its own stays writable.
            inside=(env TMPDIR="$logs/tmp" HOME=/root unshare --mount bash -c '
                mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"' "$logs")
            ;;
        no-home) user 54321 /nonexistent ;;
        one-core) inside=(taskset -c 0) ;;
        quota)
            group=/sys/fs/cgroup/torchmpi-place
            # Without the file system of cgroups these would be ordinary files.
            [ -e /sys/fs/cgroup/cgroup.controllers ] && mkdir "$group" 2>/dev/null && echo "50000 100000" >"$group/cpu.max" 2>/dev/null || {
                rmdir "$group" 2>/dev/null
                not_run "$name" "cgroups cannot be written here"
                return
            }
            # shellcheck disable=SC2016
            inside=(bash -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group")
            ;;
        apart) # start() sets these; pytest-mpi initializes MPI before
            inside=(env MPIR_CVAR_NOLOCAL=1 OMPI_MCA_btl=self,tcp)
            options=(--rank-command "$logs/container" --num-hosts 2) ;;
        pairs) pairs "$name"; return ;;
        read-only-home)
            mkdir -p "$logs/home" && chown 54321 "$logs/home"
            user 54321 "$logs/home" "mount --bind $logs/home $logs/home && mount -o remount,bind,ro $logs/home"
            ;;
        no-locks) traced "$name" trace=flock inject=flock:error=ENOLCK || { not_run "$name" "there is no strace"; return; } ;;
        slow-files) traced "$name" trace=openat inject=openat:delay_exit=2000 || { not_run "$name" "there is no strace"; return; } ;;
        two-users) two_users "$name"; return ;;
        *) fail "unknown place '$1'" "See $0 --help" ;;
    esac
    checks "$name" "$logs/$name" "$1" ${options[@]+"${options[@]}"}
    local status=$?
    [ -z "${group:-}" ] || rmdir "$group"
    return $status
}

failed=0
for mpi in $mpis; do
    prepare_environment "$mpi" dev examples "$mpi" || exit 1
    use_environment "$mpi"
    for which in "${places[@]}"; do
        (place "$which" "$mpi") || failed=1
    done
done
exit $failed
