# shellcheck shell=bash
# Sourced by run.sh: what ESPnet2's launcher starts GPU training with.
#
# It calls `${cuda_cmd} --gpu N LOG COMMAND...`. utils/run_local.sh runs COMMAND on this machine;
# a site's own script for its queue, called in the same way, can take its place.
export cuda_cmd="utils/run_local.sh"
