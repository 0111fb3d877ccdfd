"""Print how many kernels torch generates for a compiled decoder layer on a GPU; needs no GPU.

The compiler writes Triton code for an H100 although the tensors are on a CPU, and nothing runs that
code: results are undefined. A program of its own, since it replaces parts of torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

with tempfile.TemporaryDirectory() as directory:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    import torch
    import torch._dynamo.device_interface as devices
    import torch._functorch.config as autograd_config
    import torch._inductor.async_compile as compilation
    import torch._inductor.config as config
    import torch._inductor.utils as inductor
    import torch.utils._triton as triton_support
    from transformers import AutoConfig, AutoModelForCausalLM
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from echo.algo.batching import Segments
    from echo.train.models import attention, packing
    from echo.train.models.compiling import compile_layers
    from tests.train.test_compiled_layers import varlen_attn

    names: list[str] = []

    class H100:
        """Triton's view of the device that it writes code for."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_device_interface(self) -> Any:
            return torch.cpu

    def note(self: Any, name: str, source: str, device_str: str = "cuda") -> SimpleNamespace:
        names.append(name)
        return SimpleNamespace(run=lambda *arguments, **options: None)

    config.cpu_backend = "triton"
    config.compile_threads = 1
    config.fx_graph_cache = autograd_config.enable_autograd_cache = False
    for module in (triton_support, inductor):
        for name in ("has_triton", "has_triton_package"):
            setattr(module, name, lambda *arguments: True)
    devices.CpuInterface.is_triton_capable = staticmethod(lambda device=None: True)  # type: ignore[method-assign]
    devices.CpuInterface.raise_if_triton_unavailable = staticmethod(lambda device=None: None)  # type: ignore[method-assign]
    for module in [*sys.modules.values()]:
        if "triton_hash_with_backend" in vars(module):
            module.triton_hash_with_backend = lambda: "none"  # type: ignore[attr-defined]
    driver.set_active(H100())
    compilation.AsyncCompile.triton = note  # type: ignore[method-assign,assignment]
    attention.varlen_attn = varlen_attn  # type: ignore[attr-defined,assignment]

    settings = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(settings, attn_implementation=packing.NAME)
    model = model.to(torch.bfloat16).eval()
    compile_layers(list(model.model.layers), must=True)
    row = packing.arguments(Segments.of([40, 24]), attention.VARLEN)
    states = model.model(input_ids=torch.arange(64)[None], use_cache=False, **row)
    states.last_hidden_state.float().sum().backward()
    print(len(names))
