"""The table of launch configurations: how it is read, and what the compiler makes of every entry.

Triton compiles for a GPU that this machine does not have. The machine code shows the registers and
memory of a launch, and its instructions; only a GPU shows its speed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from echo.kernels.triton_kernels import (
    FLOAT32,
    HOPPER,
    MAX_SPLITS,
    PORTABLE,
    LaunchConfig,
    launch_config,
)

HOPPER_SHARED_BYTES = 227 * 1024  # what one block may use, CUDA's table of compute capabilities
SMALLEST_SHARED_BYTES = 99 * 1024  # of capabilities 8.6, 8.9 and 12.0
MAX_SPILLS = {"scores": 8, "grad_logits": 16}


def more(case: Any) -> Any:
    """Mark cases whose kind has another case in every run: each takes two seconds of compiling."""
    return pytest.param(case, marks=pytest.mark.matrix)


KERNELS = "scores", more("grad_logits")
"""For what is a matter of an entry: that both kernels compile, others say."""


def config_for(**changes: Any) -> LaunchConfig:
    arguments = {"triton_version": "3.7.1", "capability": (9, 0), "element_bytes": 2, **changes}
    return launch_config("scores", **arguments)


@pytest.mark.parametrize(
    ("version", "entry"),
    [("3.4.0", (3, 6)), ("3.6.0", (3, 6)), ("3.7.1", (3, 6)), ("3.9.0", (3, 9)),
     ("3.10.0+git", (3, 9)), ("4.0.0", (3, 9))],
)  # fmt: skip
def test_a_version_is_served_by_the_newest_entry_up_to_it(
    version: str, entry: tuple[int, int]
) -> None:
    assert config_for(triton_version=version) == HOPPER[entry]["scores"]


def test_other_gpus_and_float32_have_their_own() -> None:
    assert config_for(capability=(8, 0)) == PORTABLE
    assert config_for(capability=(12, 0)) == PORTABLE
    assert config_for(element_bytes=4) == config_for(element_bytes=4, capability=(8, 0)) == FLOAT32


def test_entries_are_powers_of_two() -> None:
    entries = [config for table in HOPPER.values() for config in table.values()]
    for config in [*entries, PORTABLE, FLOAT32]:
        for side in (config.rows, config.columns, config.depth, config.num_warps, MAX_SPLITS):
            assert side & (side - 1) == 0


# ---- ahead-of-time compilation


class MachineCode(NamedTuple):
    ptx: str
    spills: int
    """Store instructions to local memory."""
    shared_bytes: int

    @property
    def has_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def has_tma(self) -> bool:
        return "cp.async.bulk.tensor" in self.ptx


def tool(name: str) -> Path:
    """A program that comes with triton; skips the test where it does not."""
    specification = importlib.util.find_spec("triton")
    if specification is None or specification.origin is None:
        pytest.skip("triton is not installed")
    path = Path(specification.origin).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"this triton comes without {name}")
    return path


def compile_kernel(
    name: str,
    constants: dict[str, Any],
    options: dict[str, Any],
    directory: Path,
    *,
    blocks: dict[str, str] | None = None,
    capability: int = 90,
) -> MachineCode:
    """Compile `name`_kernel; arguments are float32 pointers, int32 numbers, `blocks` and constants.

    Numbers are taken to be arbitrary, as with a vocabulary that no power of two divides.
    """
    tool("ptxas")
    cuobjdump = tool("cuobjdump")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from echo.kernels import triton_kernels

    if triton_kernels.IS_INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile")
    kernel = getattr(triton_kernels, f"{name}_kernel")
    types = {**(blocks or {}), "ids_ptr": "*i32", **dict.fromkeys(constants, "constexpr")}
    signature = {
        argument: types.get(argument, "*fp32" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr")
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={**options, "enable_fp_fusion": True},
    )
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    dump = subprocess.run(
        [cuobjdump, "--dump-sass", cubin], capture_output=True, text=True, check=True
    ).stdout
    return MachineCode(
        compiled.asm["ptx"], len(re.findall(r"\bSTL\b", dump)), compiled.metadata.shared
    )


def compile_entry(
    kernel: str,
    config: LaunchConfig,
    directory: Path,
    *,
    with_entropy: bool,
    dtype: str = "bf16",
    capability: int = 90,
    numbers: dict[str, int] | None = None,
) -> MachineCode:
    """Compile a kernel that multiplies tiles, for the model width of Qwen3-4B."""
    constants = {
        "WIDTH": 2560,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "GROUP": config.group_rows,
        "ENTROPY": with_entropy,
        "UPCAST": False,
        **(numbers or {}),
    }
    blocks = {
        "states_desc": f"tensordesc<{dtype}[{config.rows}, {config.depth}]>",
        "weight_desc": f"tensordesc<{dtype}[{config.columns}, {config.depth}]>",
        "grad_desc": f"tensordesc<{dtype}[{config.rows}, {config.columns}]>",
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_kernel(
        kernel, constants, options, directory, blocks=blocks, capability=capability
    )


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


ENTRIES = {
    f"{major}.{minor} {kernel}": ((major, minor), kernel, config)
    for (major, minor), table in HOPPER.items()
    for kernel, config in table.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("with_entropy", [more(False), True])
@pytest.mark.parametrize(
    "name", [name if name.startswith("3.6 ") else more(name) for name in ENTRIES]
)
def test_every_entry_compiles_for_hopper(name: str, *, with_entropy: bool, tmp_path: Path) -> None:
    _version, kernel, config = ENTRIES[name]
    code = compile_entry(kernel, config, tmp_path, with_entropy=with_entropy)
    import triton

    assert ".target sm_90a" in code.ptx
    assert code.has_wgmma
    assert code.has_tma
    assert code.shared_bytes <= HOPPER_SHARED_BYTES
    # What spills is a matter of the compiler: an entry answers for its own versions.
    if config == launch_config(
        kernel,
        triton_version=triton.__version__,
        capability=(9, 0),
        element_bytes=2,
    ):
        assert code.spills <= MAX_SPILLS[kernel]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", [more(80), more(89), more(100), 120])
def test_the_portable_entry_fits_every_other_gpu(
    capability: int, kernel: str, tmp_path: Path
) -> None:
    code = compile_entry(kernel, PORTABLE, tmp_path, with_entropy=True, capability=capability)
    assert code.shared_bytes <= SMALLEST_SHARED_BYTES
    assert code.spills <= MAX_SPILLS[kernel]
    assert code.has_tma == (capability >= 90)


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", ["scores", "grad_logits"])
@pytest.mark.parametrize("names", [["num_rows"], ["num_rows", "num_columns", "num_splits"]])
def test_numbers_of_one_which_triton_makes_constants(
    names: list[str], kernel: str, tmp_path: Path
) -> None:
    numbers = {name: 1 for name in names if kernel == "scores" or name != "num_splits"}
    config = config_for()
    code = compile_entry(kernel, config, tmp_path, with_entropy=True, numbers=numbers)
    assert code.has_wgmma
    assert code.spills <= MAX_SPILLS[kernel]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_is_multiplied_exactly(kernel: str, tmp_path: Path) -> None:
    code = compile_entry(kernel, FLOAT32, tmp_path, with_entropy=True, dtype="fp32")
    assert "tf32" not in code.ptx
    assert code.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("dual_clip", [3.0, more(None)])
def test_the_kernel_of_single_rows_compiles(dual_clip: float | None, tmp_path: Path) -> None:
    constants = {"ROWS": 32, "LOW": 0.8, "HIGH": 1.28, "DUAL": dual_clip, "MAX_LOG": 20.0}
    constants |= {"SPLITS": MAX_SPLITS, "ENTROPY": True, "POLICY": True}
    code = compile_kernel("combine", constants, {"num_warps": 4}, tmp_path)
    assert code.spills <= 1
    assert code.shared_bytes <= SMALLEST_SHARED_BYTES
