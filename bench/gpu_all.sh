#!/usr/bin/env bash
# Measure and check on one bare GPU machine all that a machine without one cannot: kernel, learner,
# vLLM, and deltas on the device. It makes its environment, takes at most 25 minutes besides, and goes
# on where a part fails: bench/results/ has what the others found, bench/results/gpu_all/ what each
# part printed, with a line for each in summary.txt. What matters most comes first. A command may take
# the seconds that stand beside it, or what is left of the 25 minutes; then it is killed.
#
#     bench/gpu_all.sh                 all parts
#     bench/gpu_all.sh kernel learner  some of them
#     bench/gpu_all.sh --dry-run       their commands
#     bench/gpu_all.sh --minutes 60    with more time
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

is_dry=
minutes=25
parts=()
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) is_dry=1 ;;
    --minutes)
        minutes=${2-}
        shift
        ;;
    kernel | learner | deltas | vllm) parts+=("$1") ;;
    *)
        printf 'gpu_all.sh: no part is called %s; there are kernel, learner, deltas and vllm\n' "$1" >&2
        exit 2
        ;;
    esac
    shift
done
case $minutes in
'' | *[!0-9]*)
    printf 'gpu_all.sh: --minutes takes a whole number\n' >&2
    exit 2
    ;;
esac
[ ${#parts[@]} -gt 0 ] || parts=(kernel learner deltas vllm)

python=python
logs=bench/results/gpu_all
if [ -z "$is_dry" ]; then
    python=$(bin/echo-setup --role learner --extra dev --extra torchao --extra vllm) || exit 1
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        printf 'gpu_all.sh: PyTorch sees no GPU here; nothing was run\n' >&2
        exit 1
    fi
    mkdir -p "$logs"
    : >"$logs/summary.txt"
fi
end_s=$((SECONDS + 60 * minutes))

failed=0
run() { # part, name, seconds that it may take, command...
    local part=$1 name=$2 limit_s=$3
    shift 3
    case " ${parts[*]} " in *" $part "*) ;; *) return ;; esac
    if [ -n "$is_dry" ]; then
        printf '%-22s %4d s  %s\n' "$name" "$limit_s" "$*"
        return
    fi
    local started=$SECONDS status=124
    # What it leaves is killed 10 s later.
    if [ $((end_s - started - 10)) -lt "$limit_s" ]; then limit_s=$((end_s - started - 10)); fi
    if [ "$limit_s" -gt 0 ]; then
        timeout --kill-after=10 "$limit_s" "$@" >"$logs/$name.txt" 2>&1
        status=$?
    else
        printf 'not begun: no time is left\n' >"$logs/$name.txt"
    fi
    [ $status -eq 0 ] || failed=1
    printf '%-22s exit %3d after %4d s: %s\n' "$name" $status $((SECONDS - started)) "$*" |
        tee -a "$logs/summary.txt"
}

step=("$python" bench/bench_learner.py step --tokens 16384 --model)
kernel=("$python" bench/bench_kernel.py --tokens 16384 --repeats 5 --width)
publish=("$python" bench/bench_learner.py publish --model Qwen3-0.6B --tokens 16384 --lengths full
    --micro-batches 2 --steps 2 --last-version)

run kernel kernel-tests 150 "$python" -m pytest -q --all tests/kernels/triton_cases.py
run learner learner-tests 150 "$python" -m pytest -q -m gpu tests/train/test_trainer_gpu.py
run learner learner-full 120 "${step[@]}" Qwen3-0.6B --lengths full
run learner learner-4B 180 "$python" bench/bench_learner.py step --tokens 8192 --model Qwen3-4B \
    --checkpointing --ways packed --optimizer 8bit
run kernel kernel-2560 100 "${kernel[@]}" 2560 --live 1.0
run deltas delta-tests 90 \
    "$python" -m pytest -q -m gpu tests/engine/test_device_delta.py tests/runtime/test_publishing.py
run learner learner-publish-gpu 90 "${publish[@]}" gpu
run learner learner-publish-host 90 "${publish[@]}" host
# As ranks do it, with one of them.
run learner learner-sharded 100 "$python" -m torch.distributed.run --nproc-per-node 1 \
    "${publish[@]:1}" gpu
run learner learner-memory 150 "$python" bench/bench_learner.py memory --tokens 8192 --checkpointing \
    --optimizer float32 8bit offloaded
run learner learner-lognormal 120 "${step[@]}" Qwen3-0.6B --lengths lognormal
run learner learner-exact 100 "$python" bench/bench_learner.py exact
run vllm vllm-tests 200 "$python" -m pytest -q -m gpu tests/engine/test_vllm_gpu.py
[ -n "$is_dry" ] || rm -rf runs/gpu-all
# Two workers share the GPU with the learner.
run vllm vllm-quickstart 300 "$python" -m echo.cli.main quickstart --set engine.kind=vllm \
    --set engine.options.gpu_memory_utilization=0.3 --set run.max_steps=60 \
    --set run.name=gpu-all --set ui.live=off
start=$("$python" -c 'import json; print(json.load(open("runs/gpu-all/config.json"))["model"]["name"])' \
    2>/dev/null) || start=MODEL_OF_THE_QUICKSTART
run vllm vllm-swap 150 "$python" bench/bench_swap.py "$start" runs/gpu-all/final \
    --device cuda --dtype bfloat16 --process engine --parts 0.1
run deltas update 200 "$python" bench/bench_update.py --device cuda --shape Qwen3-4B --parts stages \
    --shares 0.014 --kinds 'changes, float32' --updates 3 --rounds 1
run learner learner-checkpointed 90 "${step[@]}" Qwen3-0.6B --lengths full --ways packed --checkpointing
run learner learner-offloaded 90 "${step[@]}" Qwen3-0.6B --lengths full --ways packed \
    --checkpointing offload
run kernel kernel-4096 100 "${kernel[@]}" 4096 --live 1.0
run kernel kernel-2560-entropy 100 "${kernel[@]}" 2560 --live 0.5 --entropy
run learner learner-lora 90 "${step[@]}" Qwen3-0.6B --lengths full --ways packed --lora 16
run learner learner-compiled 150 "${step[@]}" Qwen3-0.6B --lengths full --compile --ways packed
run learner learner-1.7B 90 "${step[@]}" Qwen3-1.7B --checkpointing --ways packed
run kernel kernel-4096-entropy 100 "${kernel[@]}" 4096 --live 0.5 --entropy
exit $failed
