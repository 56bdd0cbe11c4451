#!/usr/bin/env bash
# Weights fitted to NVFP4 and MXFP4 by each method, for five seeds of finetune:small, and training that begins with some
# of them. On a machine with a GPU:
#
#   bash docs/study/fits.sh SECONDS OUT [PRESET]
#
# OUT/fits.jsonl: what each `weights fit` says, a line each; OUT/METHOD: a store of what was trained from the first seed's
# weights under NVFP4 (docs/study/fitted.toml), to be merged into docs/study/fitted-store. Training ends before SECONDS are
# over, fits are not begun after them. PYTHON and DEVICE (cuda) name the interpreter and the device.
set -euo pipefail
cd "$(dirname "$0")/../.."
end=$(($(date +%s) + $1)) out=$2 python=${PYTHON:-python3} device=${DEVICE:-cuda} at=${3:-small}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export python device at work end
recipe() { # NAME X W ROTATION: the quantizers of a forward pass
    printf '[fprop]\nx = "%s"\nw = "%s"\nrotation = "%s"\n[dgrad]\ng = "bf16"\nw = "bf16"\n[wgrad]\ng = "bf16"\nx = "bf16"\n' "$2" "$3" "$4" >"$work/$1.toml"
}
for format in nvfp4 mxfp4-rceil; do
    recipe "both-$format" "$format" "$format" none && recipe "weights-$format" bf16 "$format" none
    recipe "both-$format-rotated" "$format" "$format" hadamard32 && recipe "weights-$format-rotated" bf16 "$format" hadamard32
done
fit() { # METHOD RECIPE SEED
    [ "$(date +%s)" -lt "$end" ] || { echo "no time left for $*" >&2 && return 1; }
    "$python" -m fp4dse weights fit "finetune:$at" --method "$1" --recipe "$work/$2.toml" --seed "$3" --device "$device" --json \
        --out "$work/$1-$2-$3.safetensors" >"$work/$1-$2-$3.json"
}
export -f fit
from() { # METHOD: what training from its weights gives back
    "$python" docs/study/sweep_stage.py docs/study/fitted.toml --task "finetune:$at" --seeds 0,1,2,3,4 --lr 1e-4,4e-4 --lanes 35 \
        --from "$work/$1-both-nvfp4-0.safetensors" --device "$device" --jobs 1 --budget $((end - $(date +%s) - 25)) --store "$out/$1"
}
failed=0 jobs=()
for seed in 0 1 2 3 4; do fit nearest both-nvfp4 "$seed" & jobs+=($!); done # makes the bases of all seeds
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
jobs=()
for method in gptq llm-fp4 block-ap; do
    (fit "$method" both-nvfp4 0 && from "$method") >"$work/from-$method.txt" 2>&1 & jobs+=($!)
done
for what in both-nvfp4 both-mxfp4-rceil weights-nvfp4 weights-mxfp4-rceil; do
    for seed in 0 1 2 3 4; do
        for method in gptq llm-fp4 block-ap; do [ "$what$seed" = both-nvfp40 ] || echo "$method $what $seed"; done
        echo "mr-gptq $what-rotated $seed"
    done
done | xargs -P 8 -L 1 bash -c 'fit "$@"' fit || failed=1
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
"$python" - "$work"/*.json >"$out/fits.jsonl" <<'PYTHON'
import json
import sys
from pathlib import Path

for file in map(Path, sys.argv[1:]):
    if text := file.read_text():  # empty: the fit failed
        print(json.dumps({name: value for name, value in json.loads(text).items() if not isinstance(value, dict)}))
PYTHON
wc -l "$out/fits.jsonl"
tail -n 3 "$work"/from-*.txt
exit $failed
