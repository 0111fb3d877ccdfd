"""Time handing a version to vLLM whole, and handing over only what it changes.

vLLM runs in this process, on a GPU or on a CPU with nothing packed, as on a GPU: random weights of
the shapes of a Qwen3, published and computed in bf16. CPU seconds are of the process, per GB of the
image; while weights are handed over vLLM pauses. After all patches, each bit in vLLM must be that
of the last version.

    python bench/bench_vllm_patch.py [--shape 128MiB] [--shares 0.001 0.014 0.1] [--repeats 5]
    python bench/bench_vllm_patch.py --device cuda --shape Qwen3-0.6B
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from transformers import Qwen3Config
from update.state import SHAPES, SIGMA, Shape

from echo.core.rollout import PolicyVersion
from echo.engine.vllm.arguments import import_vllm
from echo.engine.vllm.engine import VllmEngine
from echo.engine.weights import publish_image, tensors_from_image
from echo.weights.delta import BLOCK_BYTES, encode_delta, open_block, split_blocks, word_bytes_of
from echo.weights.manifest import TensorSpec
from echo.weights.store.patches import Patch


def write_config(directory: Path, shape: Shape) -> None:
    Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(directory)


def pack_nothing() -> None:
    """Have vLLM compute with its parameters as they are."""
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    utils.ops._supports_onednn = False  # noqa: SLF001 -- vLLM has no setting for it
    utils.check_cpu_sgl_kernel = lambda *_: False


def make_patch(
    specs: tuple[TensorSpec, ...], old: memoryview, share: float, step: int
) -> tuple[Patch, int]:
    """Return a patch that changes a share of the words of an image by a little, and how many."""
    rng = np.random.default_rng(step)
    new = bytearray(old)
    words = np.frombuffer(new, np.uint16)
    where = np.flatnonzero(rng.random(words.size, np.float32) < share)
    words[where] ^= 1  # the last bit of the mantissa
    patch = Patch(PolicyVersion(1, step), PolicyVersion(1, step + 1), BLOCK_BYTES)
    for number, (start, stop) in enumerate(split_blocks(len(old), BLOCK_BYTES)):
        before = old[start:stop]
        coded = encode_delta(
            before, memoryview(new)[start:stop], word_bytes=word_bytes_of(specs, start, stop)
        )
        patch.blocks[number] = open_block(memoryview(coded.coded), before, coded.old_hash)
    return patch, where.size


class Clock:
    """Wall and CPU seconds of the calls of one function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.values: tuple[Any, ...] = ()
        self.wall_s = self.cpu_s = 0.0

    def __call__(self, *values: Any, **named: Any) -> Any:
        self.values = values
        wall, cpu = time.perf_counter(), time.process_time()
        found = self._call(*values, **named)
        self.wall_s, self.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        return found


def measure(arguments: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    shape = SHAPES[arguments.shape]
    write_config(directory, shape)
    is_cpu = arguments.device == "cpu"
    import_vllm(is_cpu=is_cpu, passed={}, num_threads=1)
    if is_cpu:
        pack_nothing()
    engine = VllmEngine(
        directory,
        device=arguments.device,
        dtype="bfloat16",
        process="inline",
        # On a GPU its share is the usual one: the first version also shows that a swap fits beside.
        arguments={"enforce_eager": True} | ({"kv_cache_memory_bytes": 64 << 20} if is_cpu else {}),
        num_threads=1,
    )
    backend = engine.current()[0]
    backend.update = handed_over = Clock(backend.update)  # type: ignore[method-assign]
    torch.manual_seed(0)
    state = {name: torch.randn(size) * SIGMA for name, size in shape.tensors().items()}
    specs, data = publish_image(state, "bfloat16")
    image, gigabytes, step = memoryview(data), len(data) / 1e9, 1
    rows = []
    load, patch_all = Clock(engine.load), Clock(engine.patch)
    found = []
    for _ in range(arguments.repeats + 1):
        load(tensors_from_image(specs, image.toreadonly()), PolicyVersion(1, step))
        found.append((handed_over.cpu_s, handed_over.wall_s, load.cpu_s))
    rows.append(row_of("whole", found[1:], gigabytes, None))  # the first one also finds the places
    rows[-1]["first/cpu_s_per_gb"] = round(found[0][0] / gigabytes, 4)
    for share in arguments.shares:
        found = []
        for _ in range(arguments.repeats):
            patch, number = make_patch(specs, image, share, step)
            patch_all(patch, image, specs)
            changed = handed_over.values[0]
            assert not isinstance(changed, Mapping), "the version was handed over whole"
            step += 1
            found.append((handed_over.cpu_s, handed_over.wall_s, patch_all.cpu_s))
        rows.append(row_of(f"{share:.1%} changed", found, gigabytes, number))
        rows[-1]["copies"] = len(changed)
    assert find_unequal(backend, tensors_from_image(specs, image.toreadonly())) == []
    engine.close()
    return rows


def find_unequal(backend: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that vLLM does not hold bit by bit."""

    def compare(worker: Any) -> list[str]:
        places = worker.weight_transfer_engine._places  # noqa: SLF001
        return [
            name
            for name, tensor in tensors.items()
            if not torch.equal(
                places[name].cpu().view(-1).view(torch.int16), tensor.view(-1).view(torch.int16)
            )
        ]

    [found] = backend._engine.collective_rpc(compare)  # noqa: SLF001
    return list(found)


def row_of(
    what: str, found: list[tuple[float, float, float]], gigabytes: float, num_words: int | None
) -> dict[str, Any]:
    cpu_s, wall_s, all_s = (statistics.median(each) for each in zip(*found, strict=True))
    row = {
        "what": what,
        "handed_over/cpu_s_per_gb": round(cpu_s / gigabytes, 4),
        "handed_over/wall_s": round(wall_s, 4),
        "with_probe/cpu_s_per_gb": round(all_s / gigabytes, 4),
    }
    if num_words:
        row["handed_over/wall_ns_per_word"] = round(wall_s / num_words * 1e9, 2)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="128MiB")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.014, 0.1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = harness.parse(parser, repeats=1, shares=[0.014])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(arguments, Path(directory))
    where = "a CPU, nothing packed" if arguments.device == "cpu" else "a GPU"
    what = f"bf16 weights of the shapes of {arguments.shape} into vLLM on {where}"
    name = "vllm_patch" if arguments.device == "cpu" else "vllm_patch_gpu"
    print(f"wrote {harness.save(name, {'what': what, 'rows': rows})}")


if __name__ == "__main__":
    main()
