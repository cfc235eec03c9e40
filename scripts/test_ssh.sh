#!/usr/bin/env bash
# Jobs over ssh on two hosts made of namespaces, as an unprivileged user, with the sshd of packaging/containers.
set -uo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_ssh.sh [--mpi LIST] [--only CHECKS] [PLACE...]

Makes two hosts with scripts/hosts.sh and starts on each, as a user without privileges, an sshd that is configured as in
packaging/containers. Runs scripts/check_place.py with one rank on each host and prints a line for each place. Logs:
build/ssh/. The status is 0 only if all passed.

  mpirun      the mpirun or mpiexec of the MPI library, with a host file
  run         torchmpi run --hosts
  mpijob      the command, host file and variables of an MPIJob of Kubernetes' MPI operator (Open MPI)
  ipv6        hosts without IPv4 addresses; name it last, since they get none again
  interface   a second network on each host that reaches nobody, as docker0 does; torchmpi run --interface NAME
  network     the same; torchmpi run --interface ADDRESS/BITS

  --mpi LIST     which MPIs, default "openmpi mpich"
  --only CHECKS  checks of check_place.py, default all
  -h, --help     this text

Skipped, with status 0 and the reason, without root, sshd (Debian: apt-get install openssh-server) or iproute2.
HELP
}

mpis="openmpi mpich" places=() only=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --mpi) mpis=${2:?--mpi wants a list}; shift ;;
        --only) only=(--only "${2:?--only wants a list}"); shift ;;
        -*) fail "unknown option '$1'" "See $0 --help" ;;
        *) places+=("$1") ;;
    esac
    shift
done
[ ${#places[@]} != 0 ] || places=(mpirun run mpijob interface network ipv6)

skip() {
    say "skipped: $*"
    exit 0
}
[ "$(id -u)" = 0 ] || skip "the hosts are made of namespaces, which needs root"
PATH=$PATH:/usr/sbin:/sbin
for program in sshd ssh-keygen ip setpriv; do
    type -P "$program" >/dev/null || skip "there is no $program, see --help"
done
unshare --net --mount true 2>/dev/null || skip "this root may not make namespaces (CAP_SYS_ADMIN)"

cd "$checkout" || exit 1
logs=$checkout/build/ssh home=/home/mpiuser
rm -rf "$logs" && mkdir -p "$logs/home/.ssh" "$logs/etc" || fail "cannot write to $logs"
find_python
for name in $mpis; do
    prepare_environment "$name" dev examples "$name" || exit 1
done

# The user, with a home that all hosts share, and the keys, which an MPIJob mounts.
user=54321
{ cat /etc/passwd; echo "mpiuser:x:$user:$user::$home:/bin/bash"; } >"$logs/etc/passwd"
ssh-keygen -q -t rsa -N '' -f "$logs/home/.ssh/id_rsa" && cp "$logs/home/.ssh/id_rsa.pub" "$logs/home/.ssh/authorized_keys"
cp packaging/containers/sshd_config "$logs/home/.sshd_config"
chown -R $user:$user "$logs/home" && chmod 777 "$logs" && chmod 700 "$logs/home"

export HOSTS_STATE=${HOSTS_STATE:-/run/torchmpi-ssh} HOSTS_PREFIX=tssh HOSTS_NETWORK=10.87.23 HOSTS_SHARE=$environments
trap 'trap "" INT TERM; scripts/hosts.sh down' EXIT # not interrupted: timeout signals twice
trap 'exit 130' INT TERM
printf 'h0:1\nh1:1\n' >"$logs/hosts.mpich"
printf 'h0 slots=1\nh1 slots=1\n' >"$logs/hosts.openmpi"

# as_user HOST COMMAND...: with the environment that sshd gives a session.
as_user() {
    scripts/hosts.sh run "$1" setpriv --reuid $user --regid $user --clear-groups \
        env -i HOME=$home USER=mpiuser PATH=/opt/env/bin:/usr/bin:/bin TMPDIR=/tmp "${@:2}"
}

# start_sshd HOST: mounts what the image of packaging/containers has, and starts sshd as the user.
start_sshd() {
    # shellcheck disable=SC2016
    scripts/hosts.sh run "$1" bash -c '
        set -e
        eval "$1"
        mount -t tmpfs opt /opt && mkdir /opt/env && mount --bind "$VIRTUAL_ENV" /opt/env
        mount -t tmpfs home /home && mkdir /home/mpiuser && mount --bind "$0/home" /home/mpiuser
        mount --bind "$0/etc/passwd" /etc/passwd
        mount --bind packaging/containers/ssh_config /etc/ssh/ssh_config' "$logs" "$(python_for_users)" &&
        as_user "$1" /usr/sbin/sshd -E "$home/sshd-$1.log" -f $home/.sshd_config
}

# only_ipv6: takes the addresses of IPv4 away.
only_ipv6() {
    local index
    for index in 0 1; do
        scripts/hosts.sh run h$index bash -c "ip link del docker0 2>/dev/null; ip -4 addr flush dev eth0 &&
            ip addr replace fd87:23::$((index + 1))/64 dev eth0 nodad"
    done
    printf '::1 localhost\nfd87:23::1 h0\nfd87:23::2 h1\n' >"$HOSTS_STATE/hosts-file"
}

# second_network: an interface of each host, with one address for all, that leads nowhere.
second_network() {
    local index
    for index in 0 1; do
        scripts/hosts.sh run h$index bash -c "ip link show docker0 >/dev/null 2>&1 ||
            { ip link add docker0 type veth peer name docker1 && ip addr add 172.17.0.1/16 dev docker0 &&
                ip link set docker0 up && ip link set docker1 up; }"
    done
}

# place PLACE MPI: one line of the table.
place() {
    local name=ssh-$1-$2 launch variables=() run="torchmpi run --hosts h0:1,h1:1"
    case $1 in
        mpirun) [ "$2" = mpich ] && launch="mpiexec -f $logs/hosts.mpich" || launch="mpirun --hostfile $logs/hosts.openmpi -x PATH" ;;
        run) launch=$run ;;
        mpijob)
            # As the operator sets them in the container of the launcher. Open MPI 5 ignores them.
            variables=(OMPI_MCA_orte_keep_fqdn_hostnames=true "OMPI_MCA_orte_default_hostfile=$logs/hosts.openmpi"
                "OMPI_MCA_plm_rsh_args=-o ConnectionAttempts=10" OMPI_MCA_orte_set_default_slots=1)
            launch="torchmpi run --hostfile $logs/hosts.openmpi"
            ;;
        ipv6) only_ipv6 && launch=$run ;;
        interface) second_network && launch="$run --interface eth0" ;;
        network) second_network && launch="$run --interface $HOSTS_NETWORK.0/24" ;;
        *) fail "unknown place '$1'" "See $0 --help" ;;
    esac
    as_user h0 env ${variables[@]+"${variables[@]}"} python scripts/check_place.py --place "$name" --launch "$launch" \
        --logs "$logs/$name" --num-hosts 2 ${only[@]+"${only[@]}"} --command "scripts/test_ssh.sh $1" 2>&1 </dev/null
}

failed=0
for mpi in $mpis; do
    use_environment "$mpi"
    scripts/hosts.sh up 2 || exit 1
    for host in h0 h1; do
        start_sshd $host || fail "there is no sshd on $host: $(tail -n 3 "$logs/home/sshd-$host.log")"
    done
    for which in "${places[@]}"; do
        [ "$which-$mpi" != mpijob-mpich ] || continue
        place "$which" "$mpi" || failed=1
    done
    scripts/hosts.sh down
done
exit $failed
