# shellcheck shell=bash
# Sourced by run.sh: the environment that all stages share.

# One order of sorting everywhere, which is also the order of the ids' bytes.
export LC_ALL=C
# The ranks share the cores, so that each gets one thread.
export OMP_NUM_THREADS=1
export PYTHONIOENCODING=UTF-8
export MPLBACKEND=Agg
export PATH="${PWD}/utils:${PATH}"

# What `make setup` builds in the repository, where nothing else is active.
if ! command -v espnet_sync >/dev/null && [ -x ../.venv/bin/espnet_sync ]; then
    PATH="$(cd ../.venv/bin && pwd):${PATH}"
fi
