#!/usr/bin/env bash
# What do policies that BF16 trained solve when they answer in MXFP4? The fourth cell of trained in × evaluated in. On a
# machine with a GPU:
#
#   bash docs/study/evaluated.sh SECONDS OUT [PRESET [SEEDS]]
#
# trains a policy of walks-small for each of the seeds (40 to 71) in BF16, at 6e-5, and writes OUT/SEED, a store with what it
# solves, not trained on, of its seed's problems in MXFP4 and in BF16 (docs/study/rl-untrained.toml). Those of rl-evaluated-store
# all answered the problems of seed 0. No policy is begun in the last minute of SECONDS. PYTHON, DEVICE (cuda) and WORKERS
# (8) name the interpreter, the device, and how many run at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
end=$(($(date +%s) + $1)) out=$2 preset=${3:-walks-small} seeds=${4:-$(seq 40 71)}
python=${PYTHON:-python3} device=${DEVICE:-cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export python device preset work out end
evaluated() { # SEED
    [ $((end - $(date +%s))) -gt 60 ] || { echo "no time left for seed $1" >&2 && return 1; }
    "$python" -m fp4dse weights make "rl:$preset" --recipe bf16 --seed "$1" --lr 6e-5 --device "$device" \
        --out "$work/$1.safetensors"
    "$python" docs/study/sweep_stage.py docs/study/rl-untrained.toml --task "rl:$preset" --seeds "$1-$1" --lr 6e-5 --lanes 2 \
        --from "$work/$1.safetensors" --device "$device" --jobs 1 --budget $((end - $(date +%s))) --store "$out/$1"
}
export -f evaluated
failed=0
tr ' ' '\n' <<<"$seeds" | xargs -P "${WORKERS:-8}" -L 1 bash -c 'evaluated "$1"' evaluated || failed=1
exit $failed
