#!/usr/bin/env bash
# Several hosts on one machine, for tests: namespaces that MPI and torch.distributed take for separate computers.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: scripts/hosts.sh COMMAND

  up N            make the hosts h0 to h<N-1>, connected by a bridge
  run HOST CMD... run a command on a host, in this folder and environment
  cut HOST [in]   take down the link of a host, or only the direction to it; heal HOST restores it
  crash HOST      kill all processes of a host; revive HOST boots it again
  rate RATE [HOST]
                  limit every link, or that of one host, for example to 1gbit; none removes the limit
  delay MICROSECONDS, loss PERCENT
                  delay every packet that a host receives (a round trip takes twice as long), or drop that part of them;
                  0 ends it. Both need the scheduler netem of the kernel (sch_netem)
  down            remove everything
  -h, --help      this text

A host has its own network, hostname, process ids, IPC, /dev/shm and /tmp; all other files are those of this machine. Folders
under /tmp that hosts share: HOSTS_SHARE, a list separated by colons, besides this checkout. State: HOSTS_STATE (default
/run/torchmpi-hosts). Launchers start their remote processes with the program $HOSTS_STATE/agent in place of ssh.
With HOSTS_CORES=shared ranks know that the hosts share the cores of this machine, as containers do: they then wait for
messages without keeping a core. Otherwise each host seems to have as many cores as this machine.
A second set of hosts needs its own HOSTS_STATE, HOSTS_PREFIX (of interfaces, default tmpi) and HOSTS_NETWORK (default 10.87.21).

While hosts are up, kernel.sched_autogroup_enabled is 0 on this machine, so that their processes share its cores evenly.
Needs root with CAP_SYS_ADMIN, iproute2 and util-linux.
HELP
}

here=$(readlink -f "${BASH_SOURCE[0]}")
checkout=$(dirname "$(dirname "$here")")
state=${HOSTS_STATE:-/run/torchmpi-hosts}
network=${HOSTS_NETWORK:-10.87.21}
prefix=${HOSTS_PREFIX:-tmpi}
bridge=$prefix-br
autogroup=/proc/sys/kernel/sched_autogroup_enabled
fail() {
    printf 'hosts.sh: %s\n' "$*" >&2
    exit 1
}

hosts() {
    cat "$state/hosts" 2>/dev/null || true
}

# pid HOST: the first process of a host, as this machine counts; compared with the namespace, since numbers are used again.
pid() {
    local number
    number=$(cat "$state/$1/pid" 2>/dev/null) && [ "/proc/$number/ns/net" -ef "/run/netns/$prefix-$1" ] && echo "$number"
}

# Runs as the first process of a host, inside its namespaces.
boot() {
    local folder where
    mount --make-rprivate /
    hostname "$1"
    mount -t tmpfs -o size=4g,mode=1777 shm /dev/shm
    mount --bind "$state/hosts-file" /etc/hosts
    mount --bind "$state/$1/boot_id" /proc/sys/kernel/random/boot_id
    # /tmp of its own, since session folders are named after process ids; what hosts share is mounted again.
    mount --rbind /tmp /mnt
    mount -t tmpfs -o size=2g,mode=1777 tmp /tmp
    while read -r folder; do
        case $folder in
            /tmp/*) where=/mnt/${folder#/tmp/} && mkdir -p "$folder" && mount --rbind "$where" "$folder" ;;
        esac
    done <"$state/share"
    umount -l /mnt
    touch "$state/$1/ready"
    exec env --ignore-signal=CHLD sleep infinity # reaps the children of processes that have ended
}

start_host() {
    local folder=$state/$1 keeper
    mkdir -p "$folder"
    rm -f "$folder/ready"
    # By which ranks of different hosts know that they share cores.
    if [ "${HOSTS_CORES:-}" = shared ]; then
        cat /proc/sys/kernel/random/boot_id
    else
        cat /proc/sys/kernel/random/uuid
    fi >"$folder/boot_id"
    setsid ip netns exec "$prefix-$1" unshare --uts --ipc --pid --mount --fork --mount-proc --kill-child \
        "$here" boot "$1" </dev/null >"$folder/log" 2>&1 &
    keeper=$!
    for _ in $(seq 100); do
        [ -e "$folder/ready" ] && break
        sleep 0.05
    done
    [ -e "$folder/ready" ] || fail "$1 did not start: $(cat "$folder/log")"
    tr -d ' ' <"/proc/$keeper/task/$keeper/children" >"$folder/pid"
}

up() {
    local number=$1 index host folder
    [[ $number =~ ^[0-9]+$ ]] && [ "$number" -ge 1 ] && [ "$number" -le 32 ] || fail "up: a number from 1 to 32, not '$number'"
    [ ! -e "$state/hosts" ] && [ ! -e "/sys/class/net/$bridge" ] || fail "hosts are up already: scripts/hosts.sh down"
    mkdir -p "$state"
    trap 'down' EXIT
    trap 'exit 130' INT TERM
    : >"$state/hosts"
    for folder in "$checkout" "$state" ${HOSTS_SHARE:+${HOSTS_SHARE//:/ }}; do
        readlink -f "$folder" || fail "HOSTS_SHARE: there is no folder $folder"
    done | sort -u >"$state/share"
    printf '#!/usr/bin/env bash\nHOSTS_STATE=%q HOSTS_PREFIX=%q exec %q agent "$@"\n' "$state" "$prefix" "$here" >"$state/agent"
    chmod +x "$state/agent"
    # Launchers begin a session on each host. With autogroups, sessions share cores unevenly, and a rank that computes gets
    # next to nothing beside ranks of another session that poll: minutes instead of seconds, which no real host has.
    if [ "$(cat "$autogroup" 2>/dev/null)" = 1 ] && echo 0 >"$autogroup"; then
        touch "$state/autogroup"
    fi
    ip link add "$bridge" type bridge
    ip addr add "$network.254/24" dev "$bridge"
    ip link set "$bridge" up
    {
        printf '127.0.0.1 localhost\n%s.254 %s\n' "$network" "$(hostname)"
        for ((index = 0; index < number; index++)); do
            printf '%s.%d h%d\n' "$network" $((index + 1)) "$index"
        done
    } >"$state/hosts-file"
    for ((index = 0; index < number; index++)); do
        host=h$index
        ip netns add "$prefix-$host"
        echo "$host" >>"$state/hosts"
        ip link add "$prefix-$host" type veth peer name eth0 netns "$prefix-$host"
        ip link set "$prefix-$host" master "$bridge" up
        ip -n "$prefix-$host" link set lo up
        ip -n "$prefix-$host" addr add "$network.$((index + 1))/24" dev eth0
        ip -n "$prefix-$host" link set eth0 up
        start_host "$host"
    done
    trap - EXIT
}

down() {
    local name pids
    trap '' INT TERM
    # By namespaces and not by remembered ids: nothing escapes, and no other process is hit.
    for name in $(ip netns list | awk -v start="$prefix-h" 'index($1, start) == 1 { print $1 }'); do
        for _ in $(seq 50); do
            pids=$(ip netns pids "$name")
            [ -n "$pids" ] || break
            # shellcheck disable=SC2086 # a list of ids
            kill -9 $pids 2>/dev/null || true
            sleep 0.05
        done
        ip link del "$name" 2>/dev/null || true
        ip netns del "$name"
    done
    ip link del "$bridge" 2>/dev/null || true
    [ ! -e "$state/autogroup" ] || echo 1 >"$autogroup"
    rm -rf "$state"
}

# agent [SSH OPTION...] HOST COMMAND...: like ssh, a shell with an environment of its own and no standard input.
agent() {
    local host number child status=0
    while [ "${1#-}" != "$1" ]; do
        case $1 in -o | -p | -l | -i | -F) shift 2 ;; *) shift ;; esac
    done
    host=${1#*@}
    shift
    host=$(awk -v name="$host" '$1 == name || $2 == name { print $2 }' "$state/hosts-file")
    number=$(pid "$host") || fail "the host '$host' does not exist or has crashed"
    nsenter -t "$number" -n -u -i -p -m --wd=/root -- env -i HOME=/root USER=root SHELL=/bin/bash \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin setsid -w /bin/sh -c "$*" </dev/null &
    child=$!
    trap 'kill -TERM $child 2>/dev/null' TERM INT HUP
    wait $child || status=$?
    exit $((status > 128 ? 255 : status)) # 255: a lost connection
}

run() {
    local number
    number=$(pid "$1") || fail "the host '$1' does not exist or has crashed"
    shift
    exec nsenter -t "$number" -n -u -i -p -m --wd="$PWD" -- env TMPDIR=/tmp "$@"
}

# cut HOST [in]: in one direction by sending frames for the host to a port where nobody takes them.
cut_link() {
    if [ "${2:-}" = in ]; then
        bridge fdb replace "$(mac "$1")" dev "$(other_port "$1")" master static sticky
    else
        ip link set "$prefix-$1" down
    fi
}

heal_link() {
    local host
    ip link set "$prefix-$1" up
    bridge fdb del "$(mac "$1")" dev "$(other_port "$1")" master 2>/dev/null || true
    # Otherwise hosts that have not found the address meanwhile refuse connections for seconds ("No route to host").
    for host in $(hosts); do
        ip -n "$prefix-$host" neigh flush all
    done
}

mac() {
    ip netns exec "$prefix-$1" cat /sys/class/net/eth0/address
}

other_port() {
    local host
    for host in $(hosts); do
        [ "$host" = "$1" ] || { echo "$prefix-$host" && return; }
    done
}

# The settings are kept in files, so that each command leaves the others as they are. Both ends of a link limit the rate; the
# end that sends to the host also delays and drops.
shape() {
    local host limited rate delay loss
    limited=$(cat "$state/limited" 2>/dev/null || true)
    delay=$(cat "$state/delay" 2>/dev/null || echo 0)
    loss=$(cat "$state/loss" 2>/dev/null || echo 0)
    for host in $(hosts); do
        tc qdisc del dev "$prefix-$host" root 2>/dev/null || true
        ip netns exec "$prefix-$host" tc qdisc del dev eth0 root 2>/dev/null || true
        rate=none
        [ -n "$limited" ] && [ "$limited" != "$host" ] || rate=$(cat "$state/rate" 2>/dev/null || echo none)
        if [ "$rate" != none ]; then
            tc qdisc add dev "$prefix-$host" root handle 1: tbf rate "$rate" burst 128kb limit 16mb
            ip netns exec "$prefix-$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 128kb limit 16mb
        fi
        [ "$delay $loss" != "0 0" ] || continue
        add_netem "$prefix-$host" "$([ "$rate" = none ] && echo root || echo parent 1:1)" "$delay" "$loss"
    done
}

# add_netem LINK PLACE DELAY LOSS; the limit holds the packets of 100 ms at 10 Gbit/s.
add_netem() {
    local error
    # shellcheck disable=SC2086 # the place is one word or two
    error=$(tc qdisc add dev "$1" $2 netem limit 100000 delay "${3}us" loss "${4}%" 2>&1) && return
    rm -f "$state/delay" "$state/loss"
    fail "no delay and no loss: $error" "
This needs the scheduler netem: \`modprobe sch_netem\`, on a kernel built with CONFIG_NET_SCH_NETEM. The rate is set."
}

# keep SETTING VALUE PATTERN: checks a setting and stores it.
keep() {
    [ -e "$state/hosts" ] || fail "there are no hosts: scripts/hosts.sh up"
    [[ $2 =~ $3 ]] || fail "$1: '$2' is no valid value, see --help"
    echo "$2" >"$state/$1"
}

command=${1:--h}
[ $# = 0 ] || shift
case $command in
    -h | --help) usage; exit 0 ;;
    up | down | rate | delay | loss | cut | heal | crash | revive | run | agent | boot)
        [ "$(id -u)" = 0 ] || fail "needs root, since it makes namespaces, links and mounts" ;;
    *) usage >&2; exit 2 ;;
esac
case $command in cut | heal | crash | revive | rate | delay | loss | run) [ $# -ge 1 ] || fail "$command: an argument is missing, see --help" ;; esac
case $command in
    up) up "${1:-2}" ;;
    cut) cut_link "$@" ;;
    heal) heal_link "$@" ;;
    crash) kill -9 "$(pid "$1")" ;;
    revive) start_host "$1" ;;
    rate) keep rate "$1" '^(none|[0-9.]+[a-z]*)$' && echo "${2:-}" >"$state/limited" && shape ;;
    delay) keep delay "$1" '^[0-9]+$' && shape ;;
    loss) keep loss "$1" '^[0-9]+([.][0-9]+)?$' && shape ;;
    *) "$command" "$@" ;;
esac
