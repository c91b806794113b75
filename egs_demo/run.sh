#!/usr/bin/env bash
# Train a tiny speech enhancement model with ranks that run out of batches at different steps.

# Set bash to 'debug' mode, it will exit on:
# -e 'error', -u 'undefined variable', -o pipefail 'error in pipeline'
set -euo pipefail

log() {
    printf '%s (run.sh) %s\n' "$(date '+%Y-%m-%dT%H:%M:%S')" "$*"
}
SECONDS=0

# General configuration
stage=1                  # The first stage to run.
stop_stage=5             # The last stage to run.
nproc=2                  # Ranks on the CPU, started by torchrun. Not used with GPUs.
ngpu=0                   # GPUs, one rank each, through ESPnet2's own launch. 0: CPU.
nj=2                     # Parallel jobs of data simulation and inference.
python=espnet_sync       # What runs Python. espnet_sync: training is synced. python3: it is not.
dumpdir=dump             # Where the simulated wavs go.
datadir=data             # Where the data directories go.
expdir=exp               # Where statistics, models and results go.

# Data
an4_dir=                 # A full copy of AN4 (holds wav/ or an4/wav/). Empty: what espnet's wheel has.
archive=                 # The archive of speech and noise. Empty: the one in espnet's wheel.

# Training
iterator_type=chunk      # chunk or sequence: chooses conf/tuning/train_enh_tcn_<iterator_type>.yaml.
enh_config=              # Another training configuration; its own iterator_type counts.
enh_args=                # More arguments of enh_train, e.g. "--batch_size 16 --seed 1".
epoch_sync=shortest      # shortest, longest or none. Only where python is espnet_sync.
max_epoch=3              # Epochs to train. With a larger one, a rerun of stage 3 goes on.

help_message=$(cat <<EOF
Usage: $0 [options]

Train a tiny speech enhancement model with ESPnet2 on several ranks that run out of batches at
different steps, and show what becomes of them with and without espnet_sync.
Paths are taken from the directory of this script.

Stages
    1  Simulate data/{train,valid,test}, check them and collect their statistics
    2  Count the batches of each rank without synchronisation
    3  Train (a rerun resumes)
    4  Enhance the test set and score SI-SNR
    5  The proof: a plain DDP loop, which deadlocks without synchronisation and finishes with it

Options (and their defaults)
    --stage          # The first stage to run (${stage})
    --stop_stage     # The last stage to run (${stop_stage})
    --nproc          # Ranks on the CPU (${nproc})
    --ngpu           # GPUs, one rank each, in place of --nproc (${ngpu})
    --nj             # Parallel jobs of simulation and inference (${nj})
    --python         # What runs Python: espnet_sync syncs training, python3 does not (${python})
    --dumpdir        # Where the simulated wavs go (${dumpdir})
    --datadir        # Where the data directories go (${datadir})
    --expdir         # Where statistics, models and results go (${expdir})
    --an4_dir        # A full copy of AN4, in place of the eight utterances in espnet's wheel
    --archive        # The archive of speech and noise, in place of the one in espnet's wheel
    --iterator_type  # chunk or sequence (${iterator_type})
    --enh_config     # Training configuration (conf/tuning/train_enh_tcn_<iterator_type>.yaml)
    --enh_args       # More arguments of espnet2.bin.enh_train
    --epoch_sync     # shortest, longest or none (${epoch_sync})
    --max_epoch      # Epochs to train (${max_epoch})
EOF
)

command_line="$0 $*"
cd "$(dirname "${BASH_SOURCE[0]}")"
. utils/parse_options.sh
log "${command_line}"

option_error() {
    log "Error: $* (see $0 --help)" >&2
    exit 2
}
error() {
    log "Error: $*" >&2
    exit 1
}

if [ $# -ne 0 ]; then
    option_error "no positional arguments are taken, but got: $*"
fi

# Options
need_integer() {  # NAME MINIMUM MAXIMUM
    if ! [[ ${!1} =~ ^[0-9]{1,9}$ ]] || [ "${!1}" -lt "$2" ] || [ "${!1}" -gt "$3" ]; then
        if [ "$3" -eq 999999999 ]; then
            option_error "--$1 must be an integer of at least $2, but got '${!1}'"
        fi
        option_error "--$1 must be an integer from $2 to $3, but got '${!1}'"
    fi
}
need_choice() {  # NAME CHOICE...
    local name=$1
    shift
    case " $* " in
        *" ${!name} "*) ;;
        *) option_error "--${name} must be one of: $*, but got '${!name}'" ;;
    esac
}
need_integer stage 1 5
need_integer stop_stage 1 5
if [ "${stage}" -gt "${stop_stage}" ]; then
    option_error "--stage ${stage} comes after --stop_stage ${stop_stage}"
fi
need_integer nproc 1 999999999
need_integer ngpu 0 999999999
need_integer nj 1 999999999
need_integer max_epoch 1 999999999
need_choice iterator_type chunk sequence
need_choice epoch_sync shortest longest none
for name in python dumpdir datadir expdir; do
    [ -n "${!name}" ] || option_error "--${name} must not be empty"
done
for name in dumpdir datadir expdir; do
    case "${!name}" in
        *[[:space:],]*) option_error "--${name} must hold no space or comma, but got '${!name}'" ;;
    esac
done
if [ -z "${enh_config}" ]; then
    enh_config=conf/tuning/train_enh_tcn_${iterator_type}.yaml
elif [ ! -f "${enh_config}" ]; then
    option_error "--enh_config: no such file: ${enh_config}"
fi
if [ -n "${an4_dir}" ] && [ ! -d "${an4_dir}" ]; then
    option_error "--an4_dir: no such directory: ${an4_dir}"
fi

. ./path.sh
. ./cmd.sh

# Environment
read -r -a py <<<"${python}"
if ! command -v "${py[0]}" >/dev/null; then
    if [ "${py[0]}" = espnet_sync ]; then
        error "espnet_sync is not on PATH: run 'pip install -e \".[demo]\"' in the repository," \
            "or 'make setup', or train without synchronisation with --python python3"
    fi
    error "--python: ${py[0]} is not on PATH"
fi
if ! "${py[@]}" local/check_environment.py --ngpu "${ngpu}"; then
    exit 1
fi

num_ranks=${nproc}
if [ "${ngpu}" -gt 0 ]; then
    num_ranks=${ngpu}
fi
sync_args=()
if [ "$(basename "${py[0]}")" = espnet_sync ] || [[ " ${py[*]} " == *" -m espnet_sync "* ]]; then
    # An option that comes with --python stands.
    if [[ ${python} != *--epoch_sync* ]]; then
        sync_args+=(--epoch_sync "${epoch_sync}")
    fi
    if [[ ${python} != *--valid_epoch_sync* ]]; then
        sync_args+=(--valid_epoch_sync "${epoch_sync}")
    fi
else
    log "Note: python='${python}' is not espnet_sync: stage 3 trains without synchronisation, and" \
        "--epoch_sync ${epoch_sync} is left out there."
fi

# Directories
enh_tag=$(basename "${enh_config}" .yaml)
if [ -n "${enh_args}" ]; then
    enh_tag+="_$(tr -cs 'A-Za-z0-9._\n' '_' <<<"${enh_args}" | sed -e 's/^_*//' -e 's/_*$//')"
fi
enh_stats_dir=${expdir}/enh_stats_16k
enh_exp=${expdir}/enh_${enh_tag}
counts=${enh_exp}/batches.${num_ranks}ranks
proof=${enh_exp}/ddp_loop.${num_ranks}ranks
ready=${datadir}/.ready       # The data's checksum, written when stage 1 is through.
group_timeout=15              # Of the process group in stage 5, in seconds.
data_seed=11                  # Deals two ranks 20 and 28 batches.
proof_epochs=2                # Of the loops in stage 5.
counted_epochs=$((max_epoch < proof_epochs ? proof_epochs : max_epoch < 5 ? max_epoch : 5))

# Child processes. They run in the background so that a signal reaches this script at once, and in
# sessions of their own so that it reaches them through this script only, and once.
children=()
signal_prefix=''  # '-': signal the whole session, for a launcher that does not pass signals on.
advice=''     # What to do if a command fails, beside reading its log.
stop_children() {
    trap - EXIT INT TERM HUP
    if [ ${#children[@]} -gt 0 ]; then
        kill -TERM -- "${children[@]/#/${signal_prefix}}" 2>/dev/null || true
        wait "${children[@]}" 2>/dev/null || true
    fi
}
trap stop_children EXIT
trap 'log "Interrupted: stopping."; stop_children; exit 130' INT
trap 'log "Terminated: stopping."; stop_children; exit 143' TERM HUP

start() {  # LOG COMMAND...: start a command in the background
    local log_file=$1
    shift
    mkdir -p "$(dirname "${log_file}")"
    setsid "$@" >"${log_file}" 2>&1 </dev/null &
    children+=($!)
}
finish() {  # LOG...: wait for all that was started, in the same order
    local failed='' status i logs=("$@")
    for i in "${!children[@]}"; do
        status=0
        wait "${children[i]}" || status=$?
        if [ "${status}" -ne 0 ] && [ -z "${failed}" ]; then
            failed=${logs[i]}
            log "Error: stage ${current_stage} failed with exit status ${status}." \
                "The last lines of ${failed}:" >&2
            # What torchrun adds once a rank has failed only hides that rank's own last words.
            sed -e '/torch\/distributed\/elastic.*failed (exitcode/q' "${failed}" | tail -n 30 >&2
        fi
    done
    children=()
    if [ -n "${failed}" ]; then
        [ -z "${advice}" ] || log "What to do: ${advice}" >&2
        exit 1
    fi
}
run() {  # LOG COMMAND...: run a command; if it fails, show the tail of its log and exit
    start "$@"
    finish "$1"
}
need_file() {  # FILE STAGE
    [ -e "$1" ] || error "stage ${current_stage} needs $1: run stage $2 first (--stage $2)"
}
check_data() {
    run "${datadir}/check_data_dir.log" "${py[@]}" local/check_data_dir.py --fs 16000 \
        --unseen "${datadir}/test" "${datadir}/train" "${datadir}/valid" "${datadir}/test"
}
need_data() {
    need_file "${ready}" 1
    advice="run stage 1 again (--stage 1)"
    check_data
    advice=''
    need_file "${enh_stats_dir}/train/speech_mix_shape" 1
}
need_model_of_this_data() {
    if ! cmp -s "${ready}" "${enh_exp}/.data"; then
        error "the model in ${enh_exp} was trained on other data than ${datadir} holds now:" \
            "remove that directory and run stage 3, or give another --expdir from stage 1"
    fi
}
# One process per rank on the CPU. The variables would make ESPnet2 look for GPUs or other ranks.
clean_env=(env -u CUDA_VISIBLE_DEVICES -u PYTHON_EXEC -u LOCAL_RANK -u RANK -u WORLD_SIZE
    -u MASTER_ADDR -u MASTER_PORT)
torchrun=("${clean_env[@]}" "${py[@]}" -m torch.distributed.run --standalone --nproc_per_node "${num_ranks}")

data_args=()
for split in train valid; do
    for pair in wav.scp,speech_mix spk1.scp,speech_ref1; do
        data_args+=("--${split}_data_path_and_name_and_type" "${datadir}/${split}/${pair},sound")
    done
done
train_args=(--config "${enh_config}" "${data_args[@]}" --output_dir "${enh_exp}"
    --max_epoch "${max_epoch}" --resume true)
for split in train valid; do
    for key in speech_mix speech_ref1; do
        train_args+=("--${split}_shape_file" "${enh_stats_dir}/${split}/${key}_shape")
    done
done
read -r -d '' -a extra_args <<<"${enh_args}" || true
train_args+=(${extra_args[@]+"${extra_args[@]}"})
cpu_args=(--ngpu 0 --multiprocessing_distributed false --dist_backend gloo)


if [ "${stage}" -le 1 ] && [ "${stop_stage}" -ge 1 ]; then
    current_stage=1
    log "Stage 1: Data preparation"
    # Everything is built aside and renamed: an interrupted run leaves the old data or none.
    mkdir -p "${datadir}" "${dumpdir}" "${expdir}"
    rm -rf "${datadir}/.building" "${dumpdir}/.building" "${enh_stats_dir}.building"
    run "${datadir}/unpack_archive.log" \
        "${py[@]}" local/unpack_archive.py --archive "${archive}" --output_dir downloads
    run "${datadir}/simulate_mixtures.log" \
        "${py[@]}" local/simulate_mixtures.py --an4_dir "${an4_dir:-downloads/an4}" \
        --noise_dir downloads/noise --nj "${nj}" --seed "${data_seed}" \
        --wav_dir "${dumpdir}/.building" --final_wav_dir "${dumpdir}/raw" \
        --data_dir "${datadir}/.building"
    rm -f "${ready}"
    rm -rf "${dumpdir}/raw" "${datadir}"/{train,valid,test} "${enh_stats_dir}"
    mv "${dumpdir}/.building" "${dumpdir}/raw"
    mv "${datadir}/.building"/* "${datadir}"
    rmdir "${datadir}/.building"
    check_data
    cat "${datadir}/check_data_dir.log"

    log "Collecting statistics, log: '${enh_stats_dir}.building/collect_stats.log'"
    run "${enh_stats_dir}.building/collect_stats.log" \
        "${clean_env[@]}" "${py[@]}" -m espnet2.bin.enh_train --collect_stats true \
        --config "${enh_config}" "${data_args[@]}" --output_dir "${enh_stats_dir}.building" \
        --batch_size 4 --ngpu 0
    mv "${enh_stats_dir}.building" "${enh_stats_dir}"
    find "${dumpdir}/raw" -name '*.wav' -print0 | sort -z | xargs -0 cat | sha256sum >"${ready}"
fi


if [ "${stage}" -le 2 ] && [ "${stop_stage}" -ge 2 ]; then
    current_stage=2
    log "Stage 2: The batches of ${num_ranks} rank(s) without synchronisation," \
        "log: '${counts}.log'"
    need_data
    rm -f "${counts}".{json,md}
    run "${counts}.log" "${torchrun[@]}" local/count_batches.py --epochs "${counted_epochs}" \
        --json "${counts}.json" --table "${counts}.md" -- "${train_args[@]}" "${cpu_args[@]}"
    cp "${ready}" "${counts}.data"
    cat "${counts}.md"
fi


if [ "${stage}" -le 3 ] && [ "${stop_stage}" -ge 3 ]; then
    current_stage=3
    log "Stage 3: Training on ${num_ranks} rank(s), log: '${enh_exp}/train.log'"
    need_data
    if [ -e "${enh_exp}/checkpoint.pth" ]; then
        need_model_of_this_data
    fi
    mkdir -p "${enh_exp}"
    cp "${ready}" "${enh_exp}/.data"
    if [ "${ngpu}" -gt 0 ]; then
        signal_prefix='-'
        run "${enh_exp}/launch.log" "${py[@]}" -m espnet2.bin.launch --cmd "${cuda_cmd}" \
            --log "${enh_exp}/train.log" --ngpu "${ngpu}" --num_nodes 1 \
            --init_file_prefix "${enh_exp}/.dist_init_" --multiprocessing_distributed true -- \
            "${py[@]}" -m espnet2.bin.enh_train \
            ${sync_args[@]+"${sync_args[@]}"} "${train_args[@]}"
        signal_prefix=''
    else
        run "${enh_exp}/train.log" "${torchrun[@]}" --no-python \
            "${py[@]}" -m espnet2.bin.enh_train \
            ${sync_args[@]+"${sync_args[@]}"} "${train_args[@]}" "${cpu_args[@]}"
    fi
    # What ended each epoch, and ESPnet2's own line: losses, and steps so far (total_count).
    summary=$(sed -nE -e 's/^.*INFO: (.* batches on each of .*)$/\1/p' \
        -e 's/^.*INFO: ([0-9]+epoch) results: (\[train\]).* (loss=[^,]*),.* (total_count=[0-9]+), (\[valid\]).* (loss=[^,]*),.*$/\1: \2 \3, \4, \5 \6/p' \
        "${enh_exp}/train.log")
    echo "${summary:-No new epoch: the model in ${enh_exp} is trained for ${max_epoch} epochs or more.}"
    if [ "${#sync_args[@]}" -gt 0 ] && [ -e "${enh_exp}/epoch_sync.jsonl" ]; then
        mkdir -p "${enh_exp}/images"
        run "${enh_exp}/epochs.log" "${py[@]}" -m espnet_sync.report "${enh_exp}" \
            --plot "${enh_exp}/images/epoch_sync.png"
        cat "${enh_exp}/epochs.log"
        log "The same as a plot: '${enh_exp}/images/epoch_sync.png'"
    fi
fi


if [ "${stage}" -le 4 ] && [ "${stop_stage}" -ge 4 ]; then
    current_stage=4
    enhanced=${enh_exp}/enhanced_test
    log "Stage 4: Enhancing the test set, logs: '${enhanced}/logdir/inference.*.log'"
    need_data
    need_file "${enh_exp}/valid.loss.best.pth" 3
    need_file "${enh_exp}/config.yaml" 3
    need_model_of_this_data
    rm -rf "${enhanced}"
    mkdir -p "${enhanced}/logdir"
    num_test=$(wc -l <"${datadir}/test/wav.scp")
    num_jobs=$((nj < num_test ? nj : num_test))
    logs=()
    for job in $(seq "${num_jobs}"); do
        keys=${enhanced}/logdir/keys.${job}.scp
        awk -v jobs="${num_jobs}" -v job="${job}" 'NR % jobs == job % jobs' \
            "${datadir}/test/wav.scp" >"${keys}"
        logs+=("${enhanced}/logdir/inference.${job}.log")
        start "${logs[-1]}" "${py[@]}" -m espnet2.bin.enh_inference --ngpu 0 --fs 16000 \
            --num_workers 0 --data_path_and_name_and_type "${datadir}/test/wav.scp,speech_mix,sound" \
            --key_file "${keys}" --train_config "${enh_exp}/config.yaml" \
            --model_file "${enh_exp}/valid.loss.best.pth" \
            --output_dir "${enhanced}/logdir/output.${job}"
    done
    finish "${logs[@]}"
    cat "${enhanced}"/logdir/output.*/spk1.scp | sort >"${enhanced}/spk1.scp"
    run "${enhanced}/logdir/score.log" "${py[@]}" local/score_si_snr.py \
        --data_dir "${datadir}/test" --enhanced_scp "${enhanced}/spk1.scp" \
        --output_dir "${enhanced}"
    cat "${enhanced}/RESULTS.md"
fi


if [ "${stage}" -le 5 ] && [ "${stop_stage}" -ge 5 ]; then
    current_stage=5
    log "Stage 5: A DDP loop on ${num_ranks} rank(s) without and with synchronisation"
    need_data
    need_file "${counts}.json" 2
    cmp -s "${ready}" "${counts}.data" || error "stage 2 counted other data: run it again (--stage 2)"
    if ! "${py[@]}" -c 'import espnet_sync' 2>/dev/null; then
        error "stage 5 needs the espnet_sync package: pip install it for ${py[*]}"
    fi
    stop_at=shortest
    if [ "${epoch_sync}" = longest ]; then
        stop_at=longest
    fi
    loop() {  # SYNC SECONDS: run the loop of all ranks, for so long at most
        rm -rf "${proof}/sync_$1"
        mkdir -p "${proof}/sync_$1"
        log "--sync $1, log: '${proof}/sync_$1/loop.log'"
        run "${proof}/sync_$1/loop.log" \
            timeout --foreground --kill-after 60 "$2" \
            "${torchrun[@]}" local/ddp_loop.py --sync "$1" --stop_at "${stop_at}" \
            --epochs "${proof_epochs}" --timeout "${group_timeout}" \
            --output_dir "${proof}/sync_$1" -- "${train_args[@]}" "${cpu_args[@]}"
    }
    judge=("${py[@]}" local/final_table.py --counts "${counts}.json" --epochs "${proof_epochs}"
        --timeout "${group_timeout}" --unsynced "${proof}/sync_false")
    loop false 600
    run "${proof}/unsynced.txt" "${judge[@]}"
    if grep -q deadlock "${proof}/unsynced.txt"; then
        log "Finding: without synchronisation, the ranks wait for each other until the group's" \
            "timeout of ${group_timeout} s. This is what had to be shown, and no error."
    else
        log "Finding: the ranks are even, so that they finish without synchronisation too."
    fi
    cat "${proof}/unsynced.txt"
    loop true 600
    run "${proof}/RESULTS.md" "${judge[@]}" --synced "${proof}/sync_true"
    cat "${proof}/RESULTS.md"
fi

log "Successfully finished. [elapsed=${SECONDS}s]"
