"""Cases of tests/train/test_ranks.py: functions that are called on all ranks. They return JSON
values; the value of rank 0 is the answer.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from echo.algo import batching
from echo.algo.loss import Loss, LossInputs, LossNeeds, LossOutput
from echo.algo.losses import EntropyBonusLoss, ReferenceKlLoss, make_loss
from echo.core.errors import RankError, StorageError
from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import Sampling
from echo.engine.lora import Lora
from echo.engine.weights import VersionImages, Weights
from echo.runtime.learner.versions import publish as publish_module
from echo.runtime.learner.versions.publish import Coder, Images, Publication, make_publication
from echo.train.models import attention, policy
from echo.train.models.attention import DENSE, FA3, FA4, VARLEN, Kernel, choose_kernel
from echo.train.models.policy import Compute, ModelSource, Policy
from echo.train.models.rescoring import Rescoring
from echo.train.ranks import sharded_images, sharded_state, sharding
from echo.train.ranks.rank_group import Build, LeadTrainer, RankGroup, follow
from echo.train.ranks.sharding import ALONE, Ranks
from echo.train.step import NonfiniteWeightsError, StepError, StepResult
from echo.train.trainer import Trainer
from echo.weights import delta
from echo.weights.delta import block_bytes_of
from echo.weights.manifest import encode_signed
from echo.weights.store.items import Transfer
from tests.train.test_attention import varlen_on_a_cpu
from tests.train.test_supports import with_supports
from tests.train.test_trainer import make_group, make_groups
from tests.train.test_trainer_losses import LOSSES, stale_groups
from tests.train.trainers import CPU, FAST, TWO_UPDATES, fast_trainer

MORE_LOSSES: dict[str, Loss] = {
    "entropy": EntropyBonusLoss(loss=make_loss("dapo"), coef=0.01),
}
REFERENCE_LOSS = ReferenceKlLoss(loss=make_loss("grpo"), coef=0.1, estimator="k3")


class Touchy:
    """A loss of whole groups that fails on a group with large advantages."""

    needs = LossNeeds(whole_groups=True)

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble

    def __call__(self, inputs: LossInputs) -> LossOutput:
        assert inputs.group_index is not None
        weight = inputs.advantages[:, None] * (1.0 + inputs.group_index[:, None])
        loss = -(weight * inputs.learner_logprobs).sum() / inputs.num_tokens
        if (inputs.advantages > 1).any():
            if self.trouble == "raises":
                raise ValueError("this group is too much")
            if self.trouble == "nan":
                loss = loss * math.nan
        return LossOutput(loss=loss, token_counts={})


VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {"packs": False},
    "whichever costs less": {"packs": "auto"},
    "long segments": {"kernel": replace(DENSE, long_from=8)},
    "offloading": {"gradient_checkpointing": "offload", "optimizer_state": "offloaded"},
    "minibatches": {"optimizer": TWO_UPDATES, "loss": LOSSES["decoupled_ppo"]},
    "whole groups": {"loss": Touchy()},
    "scaled by ess": {"scales_by_ess": True},
}


def make_trainer(model_dir: str, ranks: Ranks, **options: Any) -> Trainer:
    if not ranks.is_alone:
        torch.manual_seed(ranks.rank)  # what is drawn must not depend on what was drawn before
    settings = {"loss": LOSSES["dapo"], "micro_batch_tokens": 80, "ranks": ranks}
    with pytest.MonkeyPatch.context() as patch:
        if (kernel := options.pop("kernel", None)) is not None:
            patch.setattr(policy, "choose_kernel", lambda *_: kernel)
        return fast_trainer(Path(model_dir), **(settings | options))


class Pair:
    """A trainer on several ranks, and on rank 0 also a trainer of a process alone."""

    def __init__(self, model_dir: str, ranks: Ranks, **options: Any) -> None:
        self.together = make_trainer(model_dir, ranks, **options)
        self.alone = None if ranks.rank else make_trainer(model_dir, ALONE, **options)
        self._start = [
            (trainer, trainer.weights.back_up(trainer.adapters.progress.optimizer))
            for trainer in self.trainers
        ]

    @property
    def trainers(self) -> list[Trainer]:
        return [self.together] if self.alone is None else [self.together, self.alone]

    def restart(self, loss: Loss) -> None:
        """Restore the first weights, and take another loss."""
        for trainer, undo in self._start:
            trainer.weights.restore(undo, trainer.adapters.progress.optimizer)
            trainer.loss = loss

    def compare(self, *batches: Sequence[Group]) -> dict[str, float]:
        """Return the distances of their metrics, scores and weights after these batches."""
        found = [self.together.step(groups).metrics for groups in batches]
        scores, weights = self.together.forward(batches[0][:1]), weights_of(self.together)
        off: dict[str, float] = {}
        if self.alone is None:
            return off
        before = {name: tensor.clone() for name, tensor in self.alone.snapshot().items()}
        for groups, metrics in zip(batches, found, strict=True):
            wanted = self.alone.step(groups).metrics
            assert metrics.keys() == wanted.keys()
            for name, value in wanted.items():
                far = abs(metrics[name] - value) / max(1.0, abs(value))
                off[name] = max(off.get(name, 0.0), far)
        pairs = zip(scores[0], self.alone.forward(batches[0][:1])[0], strict=True)
        off["scores"] = max(float(abs(rows - want).max()) for rows, want in pairs)
        after = self.alone.snapshot()
        far_off = {name: weights[name] - tensor for name, tensor in after.items()}
        off["weights"] = max(float(tensor.abs().max()) for tensor in far_off.values())
        moved = sum(float((after[name] - before[name]).square().sum()) for name in after)
        off["update"] = (sum(float(t.square().sum()) for t in far_off.values()) / moved) ** 0.5
        return off


def every_loss(
    rank_group: RankGroup, model_dir: str, reference_dir: str
) -> dict[str, dict[str, float]]:
    ranks = rank_group.ranks
    groups = stale_groups(Path(model_dir))
    pair = Pair(model_dir, ranks)
    found = {}
    for name, loss in (LOSSES | MORE_LOSSES).items():
        pair.restart(loss)
        found[name] = pair.compare(groups)
    found["reference"] = Pair(
        model_dir, ranks, loss=REFERENCE_LOSS, reference=ModelSource(model_dir=Path(reference_dir))
    ).compare(groups, groups)
    return found


def variants(rank_group: RankGroup, model_dir: str, untied_dir: str) -> dict[str, dict[str, float]]:
    ranks = rank_group.ranks
    batches = [make_groups(6, seed=seed) for seed in range(2)]
    adapter = {"lora": Lora(base_dir=Path(model_dir), rank=4, alpha=8), "loss": LOSSES["gepo"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_attn", varlen_on_a_cpu)
        found = {
            name: Pair(model_dir, ranks, **set_).compare(*batches)
            for name, set_ in VARIANTS.items()
        }
    found["lora"] = Pair(model_dir, ranks, **adapter).compare(*batches)
    supported = [[with_supports(group) for group in batch] for batch in batches]
    found["supports"] = Pair(model_dir, ranks).compare(*supported)
    found["untied"] = Pair(untied_dir, ranks).compare(*batches)
    # Of one row the other ranks have nothing, ever.
    found["few rows"] = Pair(model_dir, ranks).compare([make_group([1, 0], 0)])
    vars(batching)["MIN_SAVED"] = 0.0  # or it would take long prompts
    pair = Pair(model_dir, ranks)
    samples = pair.together.prepare(batches[0]).samples
    num_shared = 0
    for indices, micro in pair.together.policy.micro_batches(samples):
        assert micro.segments is not None
        num_shared += len(micro.segments.lengths) - max(1, len(indices))
    # A rank may get rows that are alone with their prompts.
    of_ranks = [int(each) for each in ranks.gather(str(num_shared).encode())]
    assert sum(of_ranks) > 1, "prompts are segments of their own"
    found["shared prompts"] = pair.compare(*batches)
    return found


def adapters(rank_group: RankGroup, model_dir: str, directory: str) -> dict[str, Any]:
    """Train two adapters in turns, one with a waiting gradient, and save the state of both."""
    lora = Lora(base_dir=Path(model_dir), rank=4, alpha=8)

    def add(trainer: Trainer) -> Trainer:
        trainer.adapters.add("code", optimizer=TWO_UPDATES)
        return trainer

    pair = Pair(model_dir, rank_group.ranks, lora=lora)
    found: dict[str, Any] = {}
    for trainer in pair.trainers:
        add(trainer)
        trainer.forward_backward(trainer.prepare(make_groups(3)), LOSSES["dapo"])
        trainer.adapters.use("code")
    found["code"] = pair.compare(make_groups(6), make_groups(5, seed=1))
    for trainer in pair.trainers:
        trainer.adapters.use("default")
    norms = [trainer.optim_step(FAST) for trainer in pair.trainers]
    found["waited"] = max(norms) - min(norms)
    found["default"] = pair.compare(make_groups(4, seed=2))
    pair.together.save_state(Path(directory))
    again = add(make_trainer(model_dir, rank_group.ranks, lora=lora, seed=7))
    again.load_state(Path(directory))
    for name in ("default", "code"):
        for trainer in (again, pair.together):
            trainer.adapters.use(name)
        weights = weights_of(again)
        same = [torch.equal(weights[key], t) for key, t in weights_of(pair.together).items()]
        found[f"{name} again"] = [all(same), again.step_count]
    return found


def trouble(rank_group: RankGroup, model_dir: str) -> dict[str, Any]:
    """A loss that fails on one rank only, and the step after it."""
    ranks = rank_group.ranks
    groups = [make_group([5 if n == 3 else 1, 0, 0, 1], n) for n in range(4)]
    pair = Pair(model_dir, ranks)
    trainer = pair.together
    before = weights_of(trainer)
    found: dict[str, Any] = {}
    # Of two minibatches the second fails, and the update of the first has to be taken back.
    for kind, num_minibatches in (("raises", 1), ("nan", 1), ("raises", 2)):
        pair.restart(Touchy(kind))
        trainer.adapters.progress.settings = replace(FAST, minibatches_per_step=num_minibatches)
        reason = ""
        try:
            trainer.step(groups)
        except StepError as error:
            reason = f"{error.reason}: {error}"
        after = weights_of(trainer)
        found[f"{kind} {num_minibatches}"] = {
            "reasons": [each.decode() for each in ranks.gather(reason.encode())],
            "is_kept": all(torch.equal(after[name], tensor) for name, tensor in before.items()),
        }
    found["faulty"] = list(trainer.find_faulty(groups))
    with TemporaryDirectory() as own:  # one for each rank
        try:
            trainer.save_state(Path(own))
        except StorageError as error:
            found["apart"] = str(error).replace(own, "HERE").replace(socket.gethostname(), "THIS")
        found["left"] = [path.name for path in Path(own).iterdir()]
    trainer.adapters.progress.settings = FAST
    trainer.adapters.progress.num_skipped_nonfinite = 0
    pair.restart(Touchy())
    found["next"] = pair.compare(groups)
    if ranks.rank == ranks.size - 1:
        with torch.no_grad():
            sharding.local(trainer.tensors()["model.norm.weight"])[-1] = torch.nan
    with TemporaryDirectory() as own:
        try:
            trainer.save_state(Path(own))
        except NonfiniteWeightsError as error:
            found["nan"] = error.names
    found["nan"] = [each.decode() for each in ranks.gather(" ".join(found["nan"]).encode())]
    return found


def in_bfloat16(rank_group: RankGroup, model_dir: str) -> dict[str, float]:
    # Six micro-batches, the same for one, two and three ranks: each rounds its own gradient.
    options = {"dtype": torch.bfloat16, "micro_batch_tokens": 25}
    return Pair(model_dir, rank_group.ranks, **options).compare(make_groups(5))


def in_8_bits(rank_group: RankGroup, model_dir: str) -> list[dict[str, float]]:
    """Make two steps with 8-bit moments, of which each rank has its own rows."""
    pair = Pair(model_dir, rank_group.ranks, optimizer_state="8bit")
    return [pair.compare(make_groups(6, seed=seed)) for seed in range(2)]


def compiled(rank_group: RankGroup, model_dir: str) -> dict[str, float]:
    """Compile the layers by torch's front end alone, which is the part that meets FSDP2's hooks."""
    compile_layer = partialmethod(torch.nn.Module.compile, backend="eager")
    torch.nn.Module.compile = compile_layer  # type: ignore[method-assign, assignment]
    off = Pair(model_dir, rank_group.ranks, compile_layers=True).compare(make_groups(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return off


def compiled_bits(rank_group: RankGroup, model_dir: str) -> dict[str, list[bool]]:
    """Compile the layers for bfloat16, and compare them with layers as they are on these ranks.

    Returns whether each rank has the same gradients and then the same weights, bit by bit.
    """
    torch._inductor.config.compile_threads = 1  # a pool would fork
    ranks, groups = rank_group.ranks, make_groups(6)
    gradients, weights = [], []
    for compile_layers in (True, False):
        options = {"dtype": torch.bfloat16, "compile_layers": compile_layers}
        trainer = make_trainer(model_dir, ranks, **options)
        trainer.forward_backward(trainer.prepare(groups), trainer.loss)
        held = [tensor.grad for tensor in trainer.policy.parameters().values()]
        shards = [sharding.local(tensor).flatten() for tensor in held if tensor is not None]
        gradients.append(torch.cat(shards))
        trainer.optim_step(FAST)
        weights.append(torch.cat([tensor.flatten() for tensor in weights_of(trainer).values()]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    pairs = {"gradients": gradients, "weights": weights}
    return {
        name: [each == b"True" for each in ranks.gather(str(torch.equal(*pair)).encode())]
        for name, pair in pairs.items()
    }


def kernel(rank_group: RankGroup) -> dict[str, list[str]]:
    """Return the kernels that each rank tries, deactivates and chooses, and its notices.

    Rank 0 alone has a package that the others lack, and one kernel fails on the last rank alone.
    """
    ranks = rank_group.ranks
    own = [FA3, FA4, DENSE, VARLEN]
    tried: list[str] = []
    deactivated: list[str] = []
    notices: list[str] = []

    def find_fault(kernel: Kernel, *_: Any) -> str | None:
        tried.append(kernel.name)
        return "it is wrong" if kernel is FA4 and ranks.rank == ranks.size - 1 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "candidates", lambda *_: own[1:] if ranks.rank else own)
        patch.setattr(attention, "find_kernel_fault", find_fault)
        patch.setattr(attention, "deactivate", lambda kernel: deactivated.append(kernel.name))
        patch.setattr(attention._log, "warning", lambda text, *of: notices.append(text % of))
        chosen = choose_kernel(CPU, torch.bfloat16, frozenset(), ranks)
    told = {"tried": tried, "deactivated": deactivated, "chosen": [chosen.name], "told": notices}
    return {
        name: [each.decode() for each in ranks.gather("; ".join(values).encode())]
        for name, values in told.items()
    }


def read_models(
    rank_group: RankGroup, sources: dict[str, dict[str, str]], large_dir: str
) -> dict[str, Any]:
    """Return which models equal those of one process bit by bit, and the memory of reading one."""
    found: dict[str, Any] = {}
    for name, given in sources.items():
        paths: dict[str, Any] = {key: Path(path) for key, path in given.items()}
        source = ModelSource(**paths)
        compute = Compute(device=CPU, ranks=rank_group.ranks)
        weights = weights_of(Policy(source, compute))
        if not rank_group.ranks.rank:
            wanted = weights_of(Policy(source, replace(compute, ranks=ALONE)))
            same = {key: torch.equal(tensor, weights[key]) for key, tensor in wanted.items()}
            found[name] = weights.keys() == wanted.keys() and all(same.values())
    whole_bytes = 0

    def be_read(policy: Policy) -> None:
        nonlocal whole_bytes
        whole_bytes = 4 * sum(tensor.numel() for tensor in policy.tensors().values())
        raise StopIteration  # what a forward takes is another matter

    Policy._choose_rows = be_read  # type: ignore[method-assign, assignment]
    with private_memory() as taken, suppress(StopIteration):
        Policy(ModelSource(model_dir=Path(large_dir)), compute)
    shares = rank_group.ranks.gather(str(max(taken) / whole_bytes).encode())
    return {**found, "shares": [float(share) for share in shares]}


@torch.no_grad()
def weights_of(model: Policy | Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of all weights; all ranks call this together."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in model.tensors().items()
    }


@contextmanager
def private_memory() -> Iterator[list[int]]:
    """Sample, every few milliseconds, the growth of the bytes that only this process has."""
    is_over = threading.Event()
    found: list[int] = []

    def look() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    def watch(before: int) -> None:
        while not is_over.wait(0.002):
            found.append(look() - before)

    thread = threading.Thread(target=watch, args=(look(),))
    thread.start()
    yield found
    is_over.set()
    thread.join()


def save_and_go_on(rank_group: RankGroup | None, directory: str, **options: Any) -> None:
    """Make two steps, save, make a third step, and write the weights beside the state."""
    ranks = ALONE if rank_group is None else rank_group.ranks
    trainer = state_trainer(ranks, **options)
    for seed in range(2):
        trainer.step(make_groups(5, seed=seed))
    trainer.save_state(Path(directory))
    for name in ("then", "after"):
        weights = weights_of(trainer)
        if ranks.rank == 0:
            save_file(weights, Path(directory).with_name(f"{name}.safetensors"))
        trainer.step(make_groups(5, seed=2))


def load_and_go_on(
    rank_group: RankGroup | None, directory: str, wanted: str, save_to: str = "", **options: Any
) -> dict[str, float]:
    """Return the distances of the loaded state, and of its third step, from those of the saver."""
    trainer = state_trainer(ALONE if rank_group is None else rank_group.ranks, **options)
    trainer.load_state(Path(directory))
    if save_to:
        trainer.save_state(Path(save_to))
    found = {"step": float(trainer.step_count)}
    for name in ("then", "after"):
        expected = load_file(Path(wanted) / f"{name}.safetensors")
        weights = weights_of(trainer)
        assert weights.keys() == expected.keys()
        found[name] = max(float((expected[n] - t).abs().max()) for n, t in weights.items())
        trainer.step(make_groups(5, seed=2))
    return found


def state_trainer(
    ranks: Ranks, *, model_dir: str, has_adapter: bool = False, **options: Any
) -> Trainer:
    adapter = {"lora": Lora(base_dir=Path(model_dir), rank=4, alpha=8)} if has_adapter else {}
    return make_trainer(model_dir, ranks, **adapter, **options)


# ------------------------------------------------------------------------------ a leader and others


RESCORING = Rescoring(
    sampling=Sampling(temperature=1, top_p=1, top_k=4, max_completion_tokens=9, stop_ids=()),
    published_dtype=torch.bfloat16,
)


def build_for(ranks: Ranks, model_dir: str) -> Build:
    def build(checkpoint: Path | None) -> Trainer:
        trainer = make_trainer(model_dir, ranks, loss=Touchy(), rescoring=RESCORING)
        if checkpoint is not None:
            trainer.load_state(checkpoint)
        return trainer

    return build


def lead(rank_group: RankGroup, model_dir: str, directory: str) -> dict[str, Any]:
    """Lead the others through every command; compare the results with those of one process."""
    build = build_for(rank_group.ranks, model_dir)
    if rank_group.ranks.rank:
        follow(rank_group, build, logging.getLogger())
        return {}
    groups, bad = make_groups(5), make_group([1, 1e9], 7)
    own: list[Trainer] = []

    def build_own(checkpoint: Path | None) -> Trainer:
        own.append(build(checkpoint))
        return own[0]

    led = LeadTrainer(rank_group, build_own, None, published_dtype="bfloat16")
    alone = make_trainer(model_dir, ALONE, loss=Touchy(), rescoring=RESCORING)
    version = Path(directory).with_name("version")
    save_file(alone.snapshot(), version)
    reason = ""
    try:
        led.step([*groups, bad])
    except StepError as error:
        reason = error.reason
    faulty = led.find_faulty([*groups, bad])
    off = {"loss": led.step(groups).metrics["loss/policy"]}
    off["loss"] -= alone.step(groups).metrics["loss/policy"]
    led.save_state(Path(directory))
    questions: dict[str, Callable[[Trainer | LeadTrainer], Any]] = {
        "scores": lambda trainer: trainer.forward(groups[:1]),
        "as published": lambda trainer: trainer.rescore(groups[:2], None),
        "of a version": lambda trainer: trainer.rescore(groups[:2], version),
    }
    for name, ask in questions.items():
        pairs = [zip(*each, strict=True) for each in zip(ask(led), ask(alone), strict=True)]
        off[name] = max(float(abs(mine - want).max()) for each in pairs for mine, want in each)
    version.write_bytes(b"half of it")
    with suppress(StorageError):
        led.rescore(groups, version)
        off["of no version"] = 1.0
    rank_group.dismiss()
    saved = make_trainer(model_dir, ALONE)
    saved.load_state(Path(directory))
    weights, wanted = saved.snapshot(), alone.snapshot()
    off["weights"] = max(float((weights[n] - tensor).abs().max()) for n, tensor in wanted.items())
    off = {name: abs(value) for name, value in off.items()}
    rescorer = own[0].models.rescorer
    assert rescorer is not None
    tensors = rescorer.policy.tensors().values()
    held = sum(sharding.local(each).numel() for each in tensors) / sum(t.numel() for t in tensors)
    return {"reason": reason, "faulty": list(faulty), "off": off, "step": led.step_count} | {
        "held": held
    }


# ------------------------------------------------------------------------------------- publication


CHUNK_BYTES = 4096


class Learner:
    """Publishes versions without encryption, which is random; each is the base of the next."""

    def __init__(self, images: Images) -> None:
        self.images = images
        key = Ed25519PrivateKey.from_private_bytes(bytes(32))
        self.coder = Coder(key, encrypts=False, helpers=images.helpers, num_threads=1)
        self._base: Transfer | None = None

    def make(self, weights: Weights, version: PolicyVersion) -> Publication:
        """Return a version, whose image may not be complete yet."""
        return make_publication(
            weights,
            version,
            run_id="run",
            images=self.images,
            chunk_bytes=CHUNK_BYTES,
        )

    def send(self, made: Publication) -> list[bytes]:
        """Return the signed and the sent parts of a version."""
        coded = [] if self._base is None else list(self.coder.segments(made, self._base))
        publication = self.coder.seal(made)
        coded += self.coder.segments(publication, None)
        signed, manifest = publication.signed, publication.manifest
        assert signed is not None
        has_chunk = bytearray(b"\1" * manifest.num_chunks)
        self._base = Transfer(signed, manifest, publication.image, has_chunk, manifest.num_chunks)
        sent = [part for each in coded for part in (each.frame, bytes(each.payload))]
        return [encode_signed(signed), bytes(publication.image), *sent]


def publish(
    rank_group: RankGroup, model_dir: str, *, far: bool, helper_dies: bool = False
) -> list[tuple[int, bool]]:
    """Return, for each of four versions, the number of sent parts, and whether they equal those of
    one process. The last rank may seem to be on another machine, or may not be able to code blocks.
    All ranks but the first send their rows, or the message that they are written, only after the
    next step.
    """
    stepped = threading.Semaphore(0)
    is_last = rank_group.ranks.rank == rank_group.ranks.size - 1
    if far and is_last:
        vars(sharded_images).update(Client=no_connection)
    if helper_dies and is_last:
        vars(sharded_images).update(code_block=None)
        threading.excepthook = lambda _: None
    if not (
        helper_dies or rank_group.ranks.rank
    ):  # the others do their share: rank 0 cannot for them
        vars(sharded_images).update(code_block=None, hash_chunks=None)
    tempfile.tempdir = "/" + 100 * "x"  # as a scheduler makes them; too long for a socket's name
    publish_module.SEGMENT_BYTES = 16 * CHUNK_BYTES  # several segments of several blocks
    delta.BLOCK_BYTES = sharded_images.PIECE_BYTES = 2 * CHUNK_BYTES

    def build(checkpoint: Path | None) -> Trainer:
        trainer = make_trainer(model_dir, rank_group.ranks)
        # There is no command that puts the weights together, so one takes another's name.
        vars(trainer).update(forward=lambda _: weights_of(trainer))
        note_steps(trainer, stepped)
        return trainer

    if rank_group.ranks.rank:
        write_late(stepped)
        follow(rank_group, build, logging.getLogger())
        return []
    led = LeadTrainer(rank_group, build, None, published_dtype="bfloat16")
    assert len(led.images.helpers) == rank_group.ranks.size - 1 - far
    block_bytes = block_bytes_of(CHUNK_BYTES)
    alone = Learner(VersionImages("bfloat16", block_bytes=block_bytes, unrounded=led.unrounded))
    together = Learner(led.images)
    found = []
    for step in range(4):
        version = PolicyVersion(1, step)
        weights: Any = led.forward([])
        wanted = alone.send(alone.make(weights, version))
        made = together.make(led.tensors(), version)
        led.step(make_groups(5, seed=step))
        found.append((len(wanted), wanted == together.send(made)))
    rank_group.dismiss()
    return found


def note_steps(trainer: Trainer, stepped: threading.Semaphore) -> None:
    """Release it at the end of each step."""
    step = trainer.step

    def step_and_note(groups: Sequence[Group]) -> StepResult:
        result = step(groups)
        stepped.release()
        return result

    trainer.step = step_and_note  # type: ignore[method-assign]


def write_late(stepped: threading.Semaphore) -> None:
    """Delay rows until a step has ended, as if the device took that long to copy them."""
    begin = sharded_images.begin_to_write

    def begin_late(places: Any, tensors: Any, stream: Any) -> Callable[[], None]:
        wait = begin(places, tensors, stream)

        def wait_long() -> None:
            assert stepped.acquire(timeout=30), "the step waits for a version"
            wait()

        return wait_long

    sharded_images.begin_to_write = begin_late


def fail_to_write() -> None:
    raise RuntimeError("the copy has failed")


def no_connection(*_: object) -> None:
    raise ConnectionRefusedError("another machine")


def be_late(rank_group: RankGroup) -> float:
    """Arrive later at a barrier than any collective would wait."""
    if rank_group.ranks.rank:
        time.sleep(be_late.times["collective_s"] + 1)  # type: ignore[attr-defined]
    rank_group.wait_for_all()
    return rank_group.ranks.add_up(1.0)


be_late.times = {"collective_s": 3.0}  # type: ignore[attr-defined]


def lose_one(rank_group: RankGroup, model_dir: str, how: str) -> dict[str, Any]:
    """Lose the last rank in the way of `how`; return the leader's error. The others are within a
    step, a checkpoint, or a rescoring.
    """

    def build(checkpoint: Path | None) -> Trainer:
        trainer = build_for(rank_group.ranks, model_dir)(checkpoint)
        if rank_group.ranks.rank == rank_group.ranks.size - 1:
            fail_later(trainer, how)
        return trainer

    if rank_group.ranks.rank:
        follow(rank_group, build, logging.getLogger())
        return {}
    led = LeadTrainer(rank_group, build, None, published_dtype="bfloat16")
    began = time.monotonic()
    try:
        if how == "hangs":
            led.rescore(make_groups(3), None)
        elif how == "killed":
            with TemporaryDirectory() as directory:
                led.save_state(Path(directory))
        else:
            led.step(make_groups(3))
    except RankError as error:
        return {"says": str(error), "after_s": time.monotonic() - began}
    return {}


def fail_later(trainer: Trainer, how: str) -> None:
    """Have this rank fail within the next command of `lose_one`."""

    def fail(*_: object, **__: object) -> None:
        if how == "hangs":
            time.sleep(60)
        if how == "has no memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.\nDetails")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])

    if how == "killed":
        vars(sharded_state).update(save=fail)
    else:
        assert trainer.models.rescorer is not None
        policy = trainer.models.rescorer.policy if how == "hangs" else trainer.policy
        policy.model.model.layers[0].mlp.register_forward_pre_hook(fail)


def lose_rows(rank_group: RankGroup, model_dir: str) -> dict[str, Any]:
    """Lose the last rank's rows of a version during the next step."""
    if rank_group.ranks.rank == rank_group.ranks.size - 1:
        sharded_images.begin_to_write = lambda *_: fail_to_write
    if rank_group.ranks.rank:
        follow(rank_group, build_for(rank_group.ranks, model_dir), logging.getLogger())
        return {}
    build = build_for(rank_group.ranks, model_dir)
    led = LeadTrainer(rank_group, build, None, published_dtype="bfloat16")
    led.images.make(led.tensors(), PolicyVersion(1, 0))
    time.sleep(1)
    try:
        led.step(make_groups(3))
    except RankError as error:
        return {"says": str(error)}
    return {}


lose_one.times = {"collective_s": 5.0}  # type: ignore[attr-defined]
