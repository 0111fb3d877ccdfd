"""Count what the learner asks of a GPU for a version and for a step, here and at another commit.

    python bench/bench_launches.py --before c8dc3db6

A CPU takes the GPU's place, so only counts are told, and the processor's seconds of the host: each
operation but a view would be a launch or a copy, and each that reads numbers of a tensor a wait.
Both trees are measured in turns, each in a process of its own, with the packages of this
environment. Micro-batches and trainer are those that the tests of each tree use; attention, which
no CPU has for packed rows of 16 bits, is one operation forward and one backward.

version       of bfloat16 words, 1 GB unless --mib says else, of which one in 120 has changed:
              operations, waits, the bytes that cross, and a hash of the blocks that they become,
              as echo.engine.weights codes them on the device
micro_batch   operations of a Qwen3 layer and of all else, forward and backward, not compiled
update        operations and waits of AdamW's step, whatever the number of tensors
layer         kernels that torch generates for a compiled Qwen3 layer, forward and backward; None
              for a tree that cannot tell
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import harness

VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "slice", "select", "expand", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "permute", "split", "unbind", "lift_fresh", "reshape",
}  # fmt: skip
"""Operations that launch nothing."""
WAITS = {"nonzero", "_local_scalar_dense", "masked_select"}
"""Operations whose result the host waits for."""
STEP = 1.6e-7
"""A step of the weights that changes one bfloat16 word in 120 of weights that spread by .02."""


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--before", help="a commit that is measured in turns with this tree")
    parser.add_argument("--mib", type=int, default=954, help="of an image")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = harness.parse(parser, mib=32, rounds=1)
    if arguments.child:
        print(json.dumps({"version": version(arguments.mib), **step(), "layer": layer()}))
        return
    runs: dict[str, list[dict[str, Any]]] = {}
    with harness.trees(arguments.before) as trees:
        for _ in range(arguments.rounds):
            for name, tree in trees.items():
                runs.setdefault(name, []).append(measure(tree, arguments.mib))
    found = {name: median(own) for name, own in runs.items()}
    for part in next(iter(found.values())):
        for name, own in found.items():
            print(f"{part:12} {name:8} {own[part]}", flush=True)
    print(f"wrote {harness.save('launches', {'mib': arguments.mib, 'trees': found})}")


def measure(tree: Path, mib: int) -> dict[str, Any]:
    """Return the counts of a tree, from a process that imports it."""
    command = [sys.executable, __file__, "--child", "--mib", str(mib)]
    environment = harness.finding(tree, Path(__file__).parent) | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result of several, where seconds are medians and counts must not differ."""
    result: dict[str, Any] = {}
    for part, first in runs[0].items():
        own = [run[part] for run in runs]
        if isinstance(first, dict):
            result[part] = median(own)
        elif part == "host_s":
            result[part] = statistics.median(own)
        elif own.count(first) == len(own):
            result[part] = first
        else:
            sys.exit(f"{part} differs between rounds: {own}")
    return result


def counted(call: Callable[[], object]) -> tuple[Counter[str], float]:
    """Call something; return what it asked of the device, by operation, and the host's seconds.

    What the operations themselves take is the device's.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()
    device_s = 0.0

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kw: Any = None) -> Any:
            nonlocal device_s
            counts[function.overloadpacket.__name__] += 1
            began = time.process_time()
            found = function(*args, **(kw or {}))
            device_s += time.process_time() - began
            return found

    class Reads(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kw: Any = None) -> Any:
            # What takes numbers out of a tensor without an operation.
            if function.__name__ in ("cpu", "tolist"):
                counts["wait"] += 1
            return function(*args, **(kw or {}))

    with Reads(), Operations():  # type: ignore[no-untyped-call] # torch's
        began = time.process_time()
        call()
        host_s = time.process_time() - began - device_s
    counts["wait"] += sum(counts[name] for name in WAITS)
    return counts, host_s


def launches(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name not in VIEWS and name != "wait")


def version(mib: int) -> dict[str, Any]:
    """Return what coding a version costs."""
    import numpy as np
    import torch
    from blake3 import blake3

    weights: Any = import_module("echo.engine.weights")
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(mib << 19, generator=generator) * 0.02
    steps = STEP * torch.randn(masters.shape, generator=generator).sign()
    old, new = (each.to(torch.bfloat16).view(torch.uint8) for each in (masters, masters + steps))
    held = old.numpy().data
    specs = [weights.TensorSpec("a", "bfloat16", (mib << 19,), 0, old.numel())]
    block_bytes = 4 << 20
    crossed: Counter[str] = Counter()
    is_block_by_block = not hasattr(weights, "copy_to_host")  # before one thread did it

    def copy_to_host(tensors: Any) -> Any:
        """Note what crosses, and the one wait for all of it."""
        several = [tensors] if is_block_by_block else tensors
        copied = [each.numpy() for each in several]
        crossed["bytes"] += sum(each.nbytes for each in copied)
        crossed["waits"] += 1
        return copied[0] if is_block_by_block else copied

    setattr(weights, "_to_host" if is_block_by_block else "copy_to_host", copy_to_host)
    made: list[Any] = []

    def code() -> None:
        if is_block_by_block:
            delta = weights.DeviceDelta(old, block_bytes=block_bytes)
            assert delta.changed_share(new, specs) < weights.SPARSE_SHARE
            made.extend(delta.encode(new, specs, held=held))
        else:
            delta = weights.DeviceDelta(old, new, specs, block_bytes=block_bytes)
            assert delta.changed_share < weights.SPARSE_SHARE
            made.extend(delta.encode(held))

    counted(code)  # what is made and imported once
    made.clear()
    crossed.clear()
    counts, host_s = counted(code)
    return {
        "operations": launches(counts),
        "waits": counts["wait"] + crossed["waits"],
        "crossing_mb": round(crossed["bytes"] / 1e6, 2),
        "host_s": round(host_s, 3),
        "coded": blake3(b"".join(bytes(np.asarray(each.coded)) for each in made)).hexdigest()[:12],
    }


def step() -> dict[str, Any]:
    """Return what a micro-batch and an update ask for, by the tests' trainer of a tiny Qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.train.test_trainer import make_groups
    from tests.train.trainers import FAST, fast_trainer

    pack_as_on_a_gpu()
    in_passes: list[float] = []
    updates: list[Counter[str]] = []
    for num_layers in (2, 3):
        settings = Qwen3Config(
            vocab_size=32, hidden_size=64, intermediate_size=192, num_hidden_layers=num_layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as directory:
            Qwen3ForCausalLM(settings).save_pretrained(directory)
            trainer: Any = fast_trainer(
                Path(directory), dtype=torch.bfloat16, micro_batch_tokens=24
            )
        for name in ("prepare", "policy", "loss"):  # before the trainer was split
            if not hasattr(trainer, name):
                setattr(trainer, name, getattr(trainer, f"_{name}"))
        batch = trainer.prepare(make_groups(8))
        number = len(list(trainer.policy.micro_batches(batch.samples)))
        counts, _ = counted(partial(trainer.forward_backward, batch, trainer.loss))
        in_passes.append(launches(counts) / number)
        updates.append(counted(partial(trainer.optim_step, FAST))[0])
    of_a_layer = in_passes[1] - in_passes[0]
    return {
        "micro_batch": {
            "of_a_layer": round(of_a_layer),
            "of_the_rest": round(in_passes[0] - 2 * of_a_layer),
        },
        "update": {
            "operations": launches(updates[0]),
            "for_each_further_layer": launches(updates[1]) - launches(updates[0]),
            "waits": updates[0]["wait"],
        },
    }


def pack_as_on_a_gpu() -> None:
    """Have packed rows take the kernel of segments that end within a row, here one operation."""
    try:
        packing: Any = import_module("echo.train.models.packing")
        attention: Any = import_module("echo.train.models.attention")
        kernel = {"kernel": attention.VARLEN}
    except ModuleNotFoundError:  # before layers were compiled
        packing = attention = import_module("echo.train.packing")
        kernel = {"uses_kernel": True}
    given = packing.arguments
    packing.arguments = lambda segments, *_, **__: given(segments, **kernel)
    attention.varlen_attn = lambda query, *_, **__: query.clone()


def layer() -> dict[str, Any]:
    """Return how many kernels torch generates for a layer on a GPU, where the tree tells."""
    script = Path("tests/train/generated_kernels.py")
    if not script.exists():
        return {"kernels": None}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.train.generated_kernels"], env={**os.environ},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {"kernels": int(ended.stdout.split()[-1])}


if __name__ == "__main__":
    main()
