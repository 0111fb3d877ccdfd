#!/usr/bin/env bash
# Measure and check on one bare GPU machine all that a machine without one cannot: kernel, learner,
# vLLM, and deltas on the device. It makes its environment, takes at most 25 minutes besides, and goes
# on where a part fails: bench/results/ has what the others found, bench/results/gpu_all/ what each
# part printed, with a line for each in summary.txt.
#
#     bench/gpu_all.sh                 all parts
#     bench/gpu_all.sh kernel learner  some of them
#     bench/gpu_all.sh --dry-run       their commands
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

is_dry=
parts=()
for argument in "$@"; do
    case $argument in
    --dry-run) is_dry=1 ;;
    kernel | learner | deltas | vllm) parts+=("$argument") ;;
    *)
        printf 'gpu_all.sh: no part is called %s; there are kernel, learner, deltas and vllm\n' "$argument" >&2
        exit 2
        ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=(kernel learner deltas vllm)

python=python
logs=bench/results/gpu_all
if [ -z "$is_dry" ]; then
    python=$(bin/echo-setup --role learner --extra dev --extra vllm) || exit 1
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        printf 'gpu_all.sh: PyTorch sees no GPU here; nothing was run\n' >&2
        exit 1
    fi
    mkdir -p "$logs"
    : >"$logs/summary.txt"
fi

failed=0
run() { # part, name, seconds that it may take, command...
    local part=$1 name=$2 limit_s=$3
    shift 3
    case " ${parts[*]} " in *" $part "*) ;; *) return ;; esac
    if [ -n "$is_dry" ]; then
        printf '%-20s %4d s  %s\n' "$name" "$limit_s" "$*"
        return
    fi
    local started=$SECONDS status
    timeout --kill-after=10 "$limit_s" "$@" >"$logs/$name.txt" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    printf '%-20s exit %3d after %4d s: %s\n' "$name" $status $((SECONDS - started)) "$*" |
        tee -a "$logs/summary.txt"
}

run kernel kernel-tests 120 "$python" -m pytest -q tests/kernels/triton_cases.py
for width in 2560 4096; do
    run kernel "kernel-$width" 40 "$python" bench/bench_kernel.py --tokens 16384 --width $width --live 1.0
    run kernel "kernel-$width-entropy" 40 \
        "$python" bench/bench_kernel.py --tokens 16384 --width $width --live 0.5 --entropy
done
run deltas delta-tests 90 \
    "$python" -m pytest -q -m gpu tests/engine/test_device_delta.py tests/runtime/test_publishing.py
run deltas update 120 \
    "$python" bench/bench_update.py --device cuda --shape Qwen3-4B --parts stages --shares 0.014
step=("$python" bench/bench_learner.py step --tokens 16384 --model)
run learner learner-exact 50 "$python" bench/bench_learner.py exact
run learner learner-full 70 "${step[@]}" Qwen3-0.6B --lengths full
run learner learner-lognormal 70 "${step[@]}" Qwen3-0.6B --lengths lognormal
run learner learner-checkpointed 45 "${step[@]}" Qwen3-0.6B --lengths full --ways packed --checkpointing
run learner learner-offloaded 45 "${step[@]}" Qwen3-0.6B --lengths full --ways packed --checkpointing offload
run learner learner-compiled 90 "${step[@]}" Qwen3-0.6B --lengths full --compile --ways packed
run learner learner-1.7B 60 "${step[@]}" Qwen3-1.7B --checkpointing --ways packed
for place in gpu host; do
    run learner learner-publish-$place 50 "$python" bench/bench_learner.py publish \
        --model Qwen3-0.6B --tokens 16384 --lengths full --micro-batches 2 --steps 2 --last-version $place
done
run learner learner-4B 90 \
    "$python" bench/bench_learner.py step --tokens 8192 --model Qwen3-4B --checkpointing --ways packed --optimizer 8bit
run learner learner-memory 50 "$python" bench/bench_learner.py memory --tokens 8192 --checkpointing \
    --optimizer float32 8bit offloaded
run vllm vllm-tests 160 "$python" -m pytest -q -m gpu tests/engine/test_vllm_gpu.py
run vllm vllm-quickstart 120 "$python" -m echo.cli.main quickstart --set engine.kind=vllm \
    --set run.name=gpu-all --set ui.live=off
run vllm vllm-swap 60 "$python" bench/bench_swap.py build/models/addition-* runs/gpu-all/final \
    --device cuda --dtype bfloat16 --process engine
exit $failed
