#!/usr/bin/env bash
# What only a GPU can say, in one table and under 25 minutes, from a fresh clone:
#
#   deploy/gpu/acceptance.sh [TFLOPS]     # the GPU's peak in bfloat16, for MFU: 989 of an H100
#
# It uses one GPU (CUDA_VISIBLE_DEVICES, else the first). The logs are in build/acceptance. The exit
# code is 1 if a step has failed or took longer than its limit.
set -uo pipefail
cd "$(dirname "$0")/../.."
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
peak="${1:-989}"
python=.venv/bin/python
logs=build/acceptance
rm -rf "$logs" && mkdir -p "$logs"
table="$logs/table.tsv"
failed=0

step() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 began=$SECONDS code=0
    shift 2
    echo "== $name (at most $limit s)" >&2
    timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1 || code=$?
    case $code in
        0) result=ok ;;
        124) result="FAILED: more than $limit s" ;;
        *) result="FAILED ($code): $(grep -v '^$' "$logs/$name.log" | tail -n 1 | cut -c1-90)" ;;
    esac
    [ "$code" = 0 ] || failed=1
    printf '%s\t%s, %s s\n' "$name" "$result" "$((SECONDS - began))" >>"$table"
}

measured() { # NAME: the measurements in its log, lines with a tab
    grep -P '^[^\t]+\t' "$logs/$1.log" | sed 's/^/    /' >>"$table"
}

told() { # DIRECTORY of a run: its measurements
    "$python" -m bench.gpu run "$1" --peak-tflops "$peak" 2>/dev/null | sed 's/^/    /' >>"$table"
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader |
    sed 's/^/GPU\t/' >>"$table" || { echo "there is no NVIDIA GPU here" >&2; exit 1; }

step set-up 420 make setup DEVICE=cuda
step kernels 80 "$python" -m bench.gpu kernels
measured kernels
step quickstart 210 make quickstart
told runs/quickstart
step learn 300 make learn
told runs/learn
step levanter 100 "$python" -m bench.learner --pairs 20 --shape 16x1024 \
    --model runs/models/smollm2-135m-instruct --out "$logs/learner.json"
"$python" -m bench.gpu learner "$logs/learner.json" 2>/dev/null | sed 's/^/    /' >>"$table"

sized() { # NAME DETERMINISTIC: 20 steps of Qwen3-0.6B by its shape, with random weights
    step "$1" 190 sh -c "$python -m bench.random_model bench/shapes/qwen3-0.6b.json \
        runs/models/qwen3-0.6b && .venv/bin/streamrl up --fresh deploy/runs/qwen3-0.6b.yaml \
        --set run=$1 --set orchestrator.max_steps=20 --set learner.deterministic=$2 \
        --set envs.chain-sum.max_tokens=256 --set buffer.group_size=8 --set buffer.max_age=4 \
        --set model.max_seq_len=512 --set batcher.max_seq_len=1024 --set batcher.row_count=32 \
        --set batcher.total_token_budget=32768 --set learner.micro_batch_rows=2 \
        --set learner.logprob_chunk=256 --set inference.max_num_seqs=128"
    told "runs/$1"
}
sized qwen3-deterministic true
sized qwen3-fast false

column -t -s "$(printf '\t')" "$table"
exit "$failed"
