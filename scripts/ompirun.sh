#!/usr/bin/env bash
# torchmpi run, with the variables HOSTFILE and OMPI_OPTIONS: for job scripts written for the Lua original.
set -euo pipefail

case ${1:--h} in
    -h | --help)
        cat <<'HELP'
usage: scripts/ompirun.sh -n RANKS [OPTION...] COMMAND [ARGUMENT...]

The same as `torchmpi run`, whose options follow. The variable HOSTFILE stands for --hostfile, and OMPI_OPTIONS for --option.

HELP
        exec python3 -m torchmpi run --help
        ;;
esac
exec python3 -m torchmpi run ${HOSTFILE:+--hostfile "$HOSTFILE"} ${OMPI_OPTIONS:+"--option=$OMPI_OPTIONS"} "$@"
