#!/usr/bin/env bash
# Collect the wheels that a GPU machine without a network lacks for `bench/gpu_all.sh --bare`: what
# Echo needs beside PyTorch, Triton, transformers, pytest and their own packages, at the versions of
# locks/all.txt; 17 MB. A machine with an older PyTorch
# than Echo asks for will do (bench/bare.py). vLLM is not among them: part C runs where it is there.
#
#     bench/bare_wheels.sh [VERSION_OF_PYTHON] [DIRECTORY]     3.12 and wheels, unless given
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=${1:-3.12} directory=${2:-wheels}
names=(
    annotated-types antlr4-python3-runtime blake3 cffi cryptography
    latex2sympy2-extended liger-kernel math-verify msgspec pycparser pydantic pydantic-core pyzmq
    typing-inspection zstandard
)
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
for name in "${names[@]}"; do
    # A yardstick of the benchmarks is in no lock.
    grep -m 1 -o "^$name==[^ ]*" "$here/locks/all.txt" || echo "$name"
done >"$requirements"
python3 -m pip download --quiet --no-deps --only-binary :all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux_2_17_x86_64 --dest "$directory" --requirement "$requirements"
du -sh "$directory"
