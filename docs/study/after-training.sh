#!/usr/bin/env bash
# Reinforcement learning and fine-tuning on a GPU that sees no network: jobs are written here, trained there, stored here.
#
#   bash docs/study/after-training.sh jobs WHICH [RATES]     here: writes runs/after/WHICH, or stores what came back in it
#   bash docs/study/after-training.sh train SECONDS OUT ...  there: trains WHICH:WORKERS ..., and packs the results to OUT
#   tar -xzf OUT/WHICH.tgz -C runs/after/WHICH               here: then `jobs WHICH` again
#
# WHICH is one of the names in `case "$which"`. Another machine needs torch, triton, numpy and msgspec. Base policies and
# base models of each seed are made there once, before the jobs.
set -euo pipefail
cd "$(dirname "$0")/../.."
case "$1" in
jobs)
    which=$2
    case "$which" in
    fixes) what=(rl-fixes --task rl:small --seeds 3 --record) rates=2.4e-4 lanes=12 ;;
    three) what=(docs/study/rl-three.toml --task rl:small --seeds 8 --record) rates=2.4e-4 lanes=16 ;;
    inject) what=(rl-inject --task rl:small --seeds 8 --record) rates=2.4e-4 lanes=16 ;;
    kl) what=(rl-kl --task rl:small-500 --seeds 3 --record) rates=2.4e-4 lanes=12 ;;
    replay) what=(rl-replay --task rl:moe-small --seeds 3 --record) rates=1.2e-4,2.4e-4 lanes=12 ;;
    walks-rate) what=(bf16 -a training.rollout=trainer,mxfp4-rceil --task rl:walks-small --task rl:walks-medium --seeds 3 --record) rates=1.2e-4,2.4e-4,4.8e-4 lanes=9 ;;
    same-walks) what=(docs/study/rl-same.toml --task rl:walks-small --task rl:walks-medium --seeds 32 --record) rates=2.4e-4 lanes=16 ;;
    # slower: 6e-5 of these is where BF16's three seeds end nearest to 82 % on walks-medium; equal-walks has it, on other seeds
    walks-slow) what=(bf16 -a training.rollout=trainer --task rl:walks-small --task rl:walks-medium --seeds 3 --record) rates=1.5e-5,3e-5,6e-5 lanes=9 ;;
    space) what=(rl --task rl:walks-small --seeds 8 --record) rates=6e-5 lanes=16 ;;
    cache) what=(docs/study/rl-cache.toml --task rl:walks-small --seeds 8 --record) rates=6e-5 lanes=16 ;;
    space-bf16) what=(rl --task rl:walks-small+bf16 --seeds 100-116 --record) rates=6e-5 lanes=16 ;; # 255 lanes
    dapo | clip-higher) what=(docs/study/rl-arms.toml --task "rl:$which-small" --seeds 8 --record) rates=2.4e-4 lanes=16 ;;
    arms) what=(docs/study/rl-arms.toml --task rl:walks-small --seeds 40-71 --record) rates=6e-5 lanes=16 ;;
    equal-walks-small | equal-walks-medium) what=(docs/study/rl-equal.toml --task "rl:${which#equal-}" --seeds 40-71 --record) rates=6e-5 lanes=16 ;;
    noise) what=(bf16 -a training.noise=none,weights,qerl --task rl:small --seeds 32 --record) rates=2.4e-4 lanes=16 ;; # into a new store: those of `same` have no records
    same) what=(docs/study/rl-same.toml --task rl:small --seeds 32 --record) rates=2.4e-4 lanes=16 ;;
    finetune) what=(finetune --task finetune:small --seeds 5) rates=1e-4,4e-4 lanes=20 ;;
    coreset) what=(bf16 -a forward=nvfp4 -a training.coreset=none,acs,random -a training.trains=all,none --task finetune:small --seeds 5) rates=1e-4,4e-4 lanes=20 ;;
    *)
        names=$(sed -n 's/^    \([a-z0-9| -]*\)) what=.*/\1/p' "$0" | sed 's/ | /\n/g' | paste -sd, | sed 's/,/, /g')
        echo "WHICH: found '$which'; accepted: $names" >&2 && exit 2
        ;;
    esac
    .venv/bin/fp4dse sweep "${what[@]}" --lr "${3:-$rates}" --device cuda --executor folder \
        --option at="runs/after/$which" --option lanes="$lanes" --store "runs/after/store-$which"
    ;;
train)
    seconds=$2 out=$3
    shift 3
    site=$(mktemp -d) && ln -s "$PWD" "$site/fp4dse" && export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    python=${PYTHON:-python3} device=${DEVICE:-cuda}
    export OMP_NUM_THREADS=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton}" XDG_CACHE_HOME=/tmp/fp4dse-cache
    end=$(($(date +%s) + seconds))
    for pair in "$@"; do # the bases of all seeds at once, so that no two workers train them
        "$python" - "runs/after/${pair%:*}" "$device" <<'PYTHON' &
import sys
from pathlib import Path
import msgspec
from fp4dse.tasks.catalogue import get_task
from fp4dse.tasks.job import Job
jobs = [msgspec.json.decode(file.read_bytes(), type=Job) for file in Path(sys.argv[1]).glob("*/job.json")]
for of in {(job.task, job.preset) for job in jobs}:
    seeds = sorted({lane.seed for job in jobs if (job.task, job.preset) == of for lane in job.lanes})
    get_task(*of).pretrain(seeds, sys.argv[2])
    print(*of, "bases of", len(seeds), "seeds", flush=True)
PYTHON
    done
    wait
    echo "bases made, $((end - $(date +%s))) s left"
    for pair in "$@"; do
        workers=${pair#*:}
        for n in $(seq 0 $((workers - 1))); do
            "$python" -m fp4dse.tasks.worker --folder "runs/after/${pair%:*}" --share "$n/$workers" \
                --budget $((end - $(date +%s))) >"/tmp/worker-${pair%:*}-$n" 2>&1 &
        done
    done
    pack() { # what is done so far
        for pair in "$@"; do
            which=${pair%:*}
            (cd "runs/after/$which" && find . -name out.json | tar -czf "$out/$which.part" -T -)
            mv "$out/$which.part" "$out/$which.tgz"
        done
    }
    while [ -n "$(jobs -r)" ]; do
        sleep 20
        pack "$@"
    done
    for pair in "$@"; do
        which=${pair%:*}
        echo "$which: $(find "runs/after/$which" -name out.json | wc -l) of $(find "runs/after/$which" -name job.json | wc -l) jobs done"
        find "runs/after/$which" -name stderr.txt -size +0 -exec tail -n 2 {} +
    done
    ;;
esac
