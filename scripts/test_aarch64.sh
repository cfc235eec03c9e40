#!/usr/bin/env bash
# The shared-memory kernels on an emulated aarch64 processor, with two ranks.
set -uo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/test_aarch64.sh [FOLDER]

Unpacks Python, PyTorch, Numba and llvmlite of Debian's arm64 release in FOLDER (default build/aarch64, 2 GB, removed
afterwards), and runs tests/jobs/launcherless_program.py on two ranks, each in qemu's emulation of a processor. The ranks
find each other through a file, without MPI, and use shared memory. Prints a line of results/places.md.

Kernels are compiled for aarch64 and run, and results are compared with references. The emulator keeps the memory order of this processor, so that a missing barrier would not be noticed here:
scripts/check_memory_order.py looks for those.

Needs root, and debootstrap and qemu-user-static of Debian. RELEASE: the release, default forky.
HELP
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
esac
folder=$(readlink -m "${1:-$checkout/build/aarch64}") release=${RELEASE:-forky}
root=$folder/root emulator=$(type -P qemu-aarch64-static) || fail "there is no qemu-aarch64-static" "apt-get install qemu-user-static"
[ "$(id -u)" = 0 ] || fail "debootstrap and chroot need root"
PATH=$PATH:/usr/sbin
type -P debootstrap >/dev/null || fail "there is no debootstrap" "apt-get install debootstrap"
mkdir -p "$folder" || exit 1

# Only the first half of debootstrap, and no scripts of packages: each would be emulated.
if [ ! -e "$root/unpacked" ]; then
    packages=python3,python3-torch,python3-numba,python3-llvmlite,python3-psutil,python3-platformdirs,python3-tqdm
    say "unpacking $release for arm64"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=$packages "$release" "$root" \
        http://deb.debian.org/debian /usr/share/debootstrap/scripts/sid >"$folder/debootstrap.log" 2>&1 ||
        fail "debootstrap failed: $(tail -n 1 "$folder/debootstrap.log")"
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$root" && rm "$package" || exit 1
    done
    cp "$emulator" "$root/emulator"
    touch "$root/unpacked"
fi
# A copy, so that a change of the checkout does not change a test that runs.
rm -rf "$root/checkout" && mkdir "$root/checkout" || exit 1
git -C "$checkout" ls-files -z torchmpi tests | (cd "$checkout" && xargs -0 cp --parents -t "$root/checkout") || exit 1

# Debian's code signs return addresses where the processor can, and the emulation of that took seven eighths of the time.
processor=neoverse-n1
# Runs as the first process of its own namespaces: nothing stays mounted or runs afterwards.
# shellcheck disable=SC2016
inside='
set -e
mount --make-rprivate /
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount -t tmpfs tmp "$0/tmp"
libraries=/usr/lib/aarch64-linux-gnu
ranks=()
for rank in 0 1; do
    env -i PATH=/usr/bin:/usr/sbin HOME=/root STORE=/tmp/store RANK=$rank WORLD_SIZE=2 NUMBA_CACHE_DIR=/tmp/cache OMP_NUM_THREADS=1 \
        TORCHMPI_STALL_ABORT_SECONDS=3000 \
        chroot "$0" /emulator -cpu "$1" -E LD_LIBRARY_PATH=$libraries/blas:$libraries/lapack /usr/bin/python3 -c "
import platform, runpy, sys, torch, numba, llvmlite
print(platform.machine(), \"Python\", platform.python_version(), \"torch\", torch.__version__, \"numba\", numba.__version__, flush=True)
sys.path.insert(0, \"/checkout\")
runpy.run_path(\"/checkout/tests/jobs/launcherless_program.py\", run_name=\"__main__\")
" &
    ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do wait "$rank" || status=$?; done
exit $status'
began=$SECONDS status=0
timeout -k 10 "${LIMIT:-3600}" unshare --mount --pid --fork --ipc --kill-child --net bash -c "ip link set lo up; $inside" "$root" \
    "$processor" >"$folder/log" 2>&1 </dev/null || status=$?
[ "$status" = 0 ] && [ "$(grep -c 'wrong \[\], hosts 1' "$folder/log")" = 3 ] || status=1
versions=$(grep -m 1 -o 'aarch64 Python.*' "$folder/log")
number=$(grep -m 1 -o 'compared [0-9]*' "$folder/log")
[ "$status" = 0 ] || tail -n 20 "$folder/log"
[ "$status" = 0 ] && [ $# = 0 ] && rm -rf "$root"
say "| aarch64, emulated | ${versions#aarch64 }, $("$emulator" --version | sed -n 's/^qemu-aarch64 version \([0-9.]*\).*/qemu \1/p') |" \
    "two ranks: kernels compiled, collectives over shm, p2p and gloo, training, parameter server: ${number:-not} with references," \
    "in $((SECONDS - began)) s | $([ "$status" = 0 ] && echo passed || echo FAILED) | \`scripts/test_aarch64.sh\` |"
exit "$status"
