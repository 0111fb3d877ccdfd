#!/usr/bin/env bash
# Measure and check on one GPU machine all that a machine without one cannot: kernel, learner, vLLM,
# and deltas on the device. It goes on where a part fails: bench/results/ has what the others found,
# bench/results/gpu_all/ what each command printed, with a line for each in summary.txt. What matters
# most comes first. A command may take the seconds that stand beside it, or what is left of the
# minutes; then it is killed. environment.json names the GPU and the versions.
#
#     bench/gpu_all.sh                 all parts: kernel, learner, deltas, vllm
#     bench/gpu_all.sh kernel learner  some of them
#
# It makes its environment and then takes at most 25 minutes, 14 with --bare: on a machine without a
# network, that has Python with PyTorch, Triton, transformers and pytest, and is lent for minutes.
#
#     bench/bare_wheels.sh 3.12 wheels    beforehand, with a network: what such a machine lacks
#     bench/gpu_all.sh --bare [--python PATH] [--wheels DIR] [A] [B] [C]
#
# A: the learner's step and publication; B: attention, profile, further ways of the step, a 4B's
# publication; C: vLLM, only where the machine has it: no script collects it. A takes some 7 minutes,
# B 6, C 2. No two commands run at once, so none slows another. The kernel's cases are last in A:
# most of them have passed on a GPU before, so they matter least where time runs out.
#
#     --dry-run      the commands, each with the seconds that it may take, and its part
#     --minutes 60   with more time
#     --quick        the quick form of each command, which writes no result and needs no GPU
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

is_dry= is_bare= quick= python= wheels= minutes=
parts=()
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) is_dry=1 ;;
    --bare) is_bare=1 ;;
    --quick) quick=--quick ;;
    --minutes | --python | --wheels)
        declare "${1#--}=${2:-missing}"
        shift
        ;;
    *) parts+=("$1") ;;
    esac
    shift
done
if [ -z "$minutes" ]; then
    minutes=25
    [ -z "$is_bare" ] || minutes=14
    [ -z "$quick" ] || minutes=60
fi
case $minutes in
*[!0-9]*)
    printf 'gpu_all.sh: --minutes takes a whole number\n' >&2
    exit 2
    ;;
esac
known=(kernel learner deltas vllm)
[ -z "$is_bare" ] || known=(A B C)
[ ${#parts[@]} -gt 0 ] || parts=("${known[@]}")
for part in "${parts[@]}"; do
    case " ${known[*]} " in *" $part "*) continue ;; esac
    printf 'gpu_all.sh: no part is called %s; there are %s\n' "$part" "${known[*]}" >&2
    exit 2
done

# --- environment ---

make_entry_point() { # by which vLLM's processes find Echo, as an installation would
    local about=build/bare/echo_rl-0.dist-info
    mkdir -p "$about"
    printf 'Metadata-Version: 2.1\nName: echo-rl\nVersion: 0\n' >"$about/METADATA"
    printf '[vllm.general_plugins]\necho = echo.engine.vllm.plugin:register\n' >"$about/entry_points.txt"
    export PYTHONPATH=$PYTHONPATH:$PWD/build/bare
}

make_packages() { # of the wheels, beside what the machine has
    local packages=$wheels/packages
    if [ ! -d "$packages" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --no-compile \
            --target "$packages.partial" "$wheels"/*.whl && mv "$packages.partial" "$packages" || return
    fi
    export PYTHONPATH=$PYTHONPATH:$packages
}

logs=bench/results/gpu_all
[ -z "$quick" ] || logs=$(mktemp -d)
if [ -n "$is_bare" ] || [ -n "$is_dry" ]; then
    python=${python:-python3}
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
if [ -z "$is_dry" ]; then
    if [ -n "$is_bare" ]; then
        make_entry_point || exit 1
        [ -z "$wheels" ] || make_packages || exit 1
    elif [ -z "$python" ]; then
        python=$(bin/echo-setup --role learner --extra dev --extra vllm) || exit 1
    fi
    sees_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
    if [ -z "$quick" ] && ! "$python" -c "$sees_gpu"; then
        printf 'gpu_all.sh: PyTorch sees no GPU here; nothing was run\n' >&2
        exit 1
    fi
    mkdir -p "$logs"
    : >"$logs/summary.txt"
    "$python" -c 'import json, sys, torch; sys.path.insert(0, "bench"); import harness
print(json.dumps(harness.environment(), indent=1))' >"$logs/environment.json"
fi
# What is compiled for one command serves the next.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/build/inductor}
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$PWD/build/vllm}
# vLLM's log names its attention, its share of the memory, and how long each part of a start takes.
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO}
end_s=$((SECONDS + 60 * minutes))

# --- commands ---

shrink() { # command: leave sizes and a GPU's kernels to its quick form
    command=()
    while [ $# -gt 0 ]; do
        case $1 in
        --tokens | --model | --width | --repeats | --steps | --micro-batches | --shape | --optimizer | \
            --liger | --device) while [ $# -gt 1 ] && [[ $2 != --* ]]; do shift; done ;;
        --compile) [[ $begun == *--compile* ]] || command+=("$1") ;; # once: it takes a minute
        *) command+=("$1") ;;
        esac
        shift
    done
    command+=(--quick)
}

failed=0 total_s=0 begun=
end() {
    [ -z "$is_dry" ] || printf 'at most %d s, and %d minutes\n' $total_s "$minutes" >&2
    exit $failed
}

run() { # part, name, seconds that it may take, command...
    local part=$1 name=$2 limit_s=$3
    shift 3
    case " ${parts[*]} " in *" $part "*) ;; *) return ;; esac
    local command=("$@")
    if [ -n "$quick" ]; then
        limit_s=$((8 * limit_s)) # a CPU compiles more slowly
        case "$*" in
        *triton_cases*) command+=(--collect-only) ;; # interpreted, they take minutes
        *quickstart*) command+=(--set run.max_steps=1 --set "run.dir=$logs") ;;
        *pytest* | *import*) ;;
        *bench/*) shrink "$@" ;;
        *) return ;;
        esac
        # Of several sizes the quick form is the same.
        [[ $begun != *"|${command[*]}|"* ]] || [ -n "$is_dry" ] || return 0
        begun+="|${command[*]}|"
    fi
    if [ -n "$is_dry" ]; then
        printf '%-22s %4d s  %-7s %s\n' "$name" "$limit_s" "$part" "${command[*]}"
        total_s=$((total_s + limit_s))
        return
    fi
    local started=$SECONDS status=124
    # What it leaves is killed 10 s later.
    if [ $((end_s - started - 10)) -lt "$limit_s" ]; then limit_s=$((end_s - started - 10)); fi
    if [ "$limit_s" -gt 0 ]; then
        timeout --kill-after=10 "$limit_s" "${command[@]}" >"$logs/$name.txt" 2>&1
        status=$?
    else
        printf 'not begun: no time is left\n' >"$logs/$name.txt"
    fi
    if [ $status -ne 0 ]; then
        failed=1
        [ -z "$quick" ] || tail -n 20 "$logs/$name.txt"
    fi
    printf '%-22s exit %3d after %4d s: %s\n' "$name" $status $((SECONDS - started)) \
        "${command[*]}" | tee -a "$logs/summary.txt"
    return $status
}

start=("$python")
[ -z "$is_bare" ] || start+=(bench/bare.py)
tests=("${start[@]}" -m pytest -q -rfEP -p no:cacheprovider) # with what passing tests print
kernel=("${start[@]}" bench/bench_kernel.py --tokens 16384 --repeats 5 --width)
bench=("${start[@]}" bench/bench_learner.py)
step=("${bench[@]}" step --tokens 16384 --steps 3 --model Qwen3-0.6B)
compiled=("${step[@]}" --compile)
publish=("${bench[@]}" publish --model Qwen3-0.6B --tokens 16384 --lengths full --micro-batches 2
    --steps 2 --compile --last-version)
as_ranks=("$python" -m torch.distributed.run --nproc-per-node 1 "${publish[@]:1}")
of_4B=(--model Qwen3-4B --tokens 8192 --lengths full --micro-batches 2 --checkpointing --compile)
step_4B=("${bench[@]}" step "${of_4B[@]}" --steps 3 --ways packed)
publish_4B=("${bench[@]}" publish "${of_4B[@]}" --optimizer 8bit --steps 2)

# Each of the likeliest first failures of vLLM on CUDA, most of them within a minute: what is
# installed and compiles; attention for heads of 32, probe and a swap by processes; a batch in
# flight at a swap; recorded ids; two that start together on one GPU; a swap on a full card, and
# patches with their bits; captured graphs; adapters.
vllm_tests=("${tests[@]}" -x -m gpu tests/engine/test_vllm_gpu.py -k)
vllm_parts() { # part; where vLLM is not there or does not start in time, the rest is left out
    run "$1" vllm-installed 25 "$python" -c "import torch, vllm; from echo.engine.vllm.starting \
import find_missing_compiler, find_missing_plugin as plugin; \
print(vllm.__version__, torch.__version__, find_missing_compiler(), plugin())" || return
    run "$1" vllm-eager 60 "${vllm_tests[@]}" 'eager and swapped'
    [ $? -lt 124 ] || return
    run "$1" vllm-keep 40 "${vllm_tests[@]}" keep
    run "$1" vllm-supports 40 "${vllm_tests[@]}" 'eager and supports'
    run "$1" vllm-two 55 "${vllm_tests[@]}" measured
    run "$1" vllm-patch 50 "${start[@]}" bench/bench_vllm_patch.py --device cuda \
        --shape Qwen3-0.6B --shares 0.014 --repeats 3
    run "$1" vllm-graphs 60 "${vllm_tests[@]}" 'graphs and not adapter'
    run "$1" vllm-adapters 40 "${vllm_tests[@]}" 'graphs and adapter'
    return 0
}

if [ -n "$is_bare" ]; then
    run A learner-tests 140 "${tests[@]}" -m gpu tests/train/test_trainer_gpu.py \
        tests/train/test_attention.py
    run A compiled-full 90 "${compiled[@]}" --lengths full --ways packed
    run A compiled-warm 100 "${compiled[@]}" --lengths full # and beside padded and plain rows
    run A compiled-lognormal 50 "${compiled[@]}" --lengths lognormal --ways packed
    run A lognormal 60 "${step[@]}" --lengths lognormal --ways packed plain
    run A publish-host 60 "${publish[@]}" host
    run A publish-gpu 60 "${publish[@]}" gpu
    run A 4B-8bit 80 "${step_4B[@]}" --optimizer 8bit
    run A 4B-float32 60 "${step_4B[@]}" --optimizer float32
    run A delta-tests 60 "${tests[@]}" -m gpu tests/engine/test_device_delta.py \
        tests/runtime/test_publishing.py
    run A kernel-tests 80 "${tests[@]}" --all tests/kernels/triton_cases.py
    run B attention 35 "${start[@]}" bench/bench_attention.py
    run B profile 45 "${bench[@]}" profile --model Qwen3-0.6B --tokens 16384 --compile
    run B checkpointed 45 "${compiled[@]}" --lengths full --ways packed --checkpointing
    run B offloaded 45 "${compiled[@]}" --lengths full --ways packed --checkpointing offload
    run B publish-4B 95 "${publish_4B[@]}"
    run B lora 50 "${compiled[@]}" --lengths full --ways packed --lora 16
    run B publish-sharded 70 "${as_ranks[@]}" gpu
    vllm_parts C
    run B liger 35 "${step[@]}" --lengths full --ways plain \
        --liger rope rms_norm swiglu
    run B kernel-2560 50 "${kernel[@]}" 2560 --live 0.85 # a share of the rows is clipped
    end
fi

run kernel kernel-tests 150 "${tests[@]}" --all tests/kernels/triton_cases.py
run learner learner-tests 200 "${tests[@]}" -m gpu tests/train/test_trainer_gpu.py \
    tests/train/test_attention.py
run learner learner-full 150 "${compiled[@]}" --lengths full
run learner learner-lognormal 150 "${compiled[@]}" --lengths lognormal
run learner learner-4B 150 "${step_4B[@]}" plain --optimizer 8bit
run learner learner-profile 90 "${bench[@]}" profile --model Qwen3-0.6B --tokens 16384 --compile
run learner attention 60 "${start[@]}" bench/bench_attention.py
run kernel kernel-2560 100 "${kernel[@]}" 2560 --live 1.0
run deltas delta-tests 90 \
    "${tests[@]}" -m gpu tests/engine/test_device_delta.py tests/runtime/test_publishing.py
run learner learner-publish-gpu 90 "${publish[@]}" gpu
run learner learner-publish-host 90 "${publish[@]}" host
run learner learner-publish-4B 120 "${publish_4B[@]}"
run learner learner-sharded 100 "${as_ranks[@]}" gpu
run learner learner-memory 150 "${bench[@]}" memory --tokens 8192 --checkpointing \
    --optimizer float32 8bit offloaded
run learner learner-exact 100 "${bench[@]}" exact
if vllm_parts vllm; then
    [ -n "$is_dry$quick" ] || rm -rf runs/gpu-all
    # Two workers share the GPU with the learner.
    run vllm vllm-quickstart 300 "$python" -m echo.cli.main quickstart --set engine.kind=vllm \
        --set run.max_steps=60 --set run.name=gpu-all --set ui.live=off
    swap=("$python" bench/bench_swap.py)
    if [ -z "$quick" ]; then
        model=$("$python" -c \
            'import json; print(json.load(open("runs/gpu-all/config.json"))["model"]["name"])' \
            2>/dev/null) || model=MODEL_OF_THE_QUICKSTART
        swap+=("$model" runs/gpu-all/final --dtype bfloat16 --process engine --parts 0.1)
    fi
    run vllm vllm-swap 150 "${swap[@]}" --device cuda
fi
run deltas update 200 "$python" bench/bench_update.py --device cuda --shape Qwen3-4B --parts stages \
    --shares 0.014 --kinds 'changes, float32' --updates 3 --rounds 1
run learner learner-checkpointed 120 "${compiled[@]}" --lengths full --ways packed plain \
    --checkpointing
run learner learner-offloaded 90 "${compiled[@]}" --lengths full --ways packed \
    --checkpointing offload
run kernel kernel-4096 100 "${kernel[@]}" 4096 --live 1.0
run kernel kernel-2560-entropy 100 "${kernel[@]}" 2560 --live 0.5 --entropy
run learner learner-lora 90 "${compiled[@]}" --lengths full --ways packed --lora 16
run learner learner-uncompiled 90 "${step[@]}" --lengths full --ways packed
run learner learner-1.7B 90 "${compiled[@]}" --model Qwen3-1.7B --checkpointing --ways packed
run kernel kernel-4096-entropy 100 "${kernel[@]}" 4096 --live 0.5 --entropy
end
