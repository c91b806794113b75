#!/usr/bin/env bash
# Run a command on this machine with its output in a log file.
#
# ESPnet2's launcher calls this as `run_local.sh [--gpu N] LOG COMMAND...`. Options of schedulers
# (`--num_threads N`, `--mem SIZE`, ...) are taken and have no effect here.

set -euo pipefail

while [ $# -gt 0 ]; do
    case "$1" in
        --*)
            if [ $# -lt 2 ]; then
                echo "$0: Error: $1 needs a value" >&2
                exit 2
            fi
            shift 2
            ;;
        *) break ;;
    esac
done

if [ $# -lt 2 ]; then
    echo "Usage: $0 [--gpu N] LOG COMMAND..." >&2
    exit 2
fi

log_file=$1
shift
mkdir -p "$(dirname "${log_file}")"
{
    echo "# $*"
    echo "# Started at $(date)"
} >"${log_file}"
# exec: a signal to this process is a signal to the command.
exec "$@" >>"${log_file}" 2>&1
