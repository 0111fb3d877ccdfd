"""The models of a trainer: the trained policy, and up to two frozen models.

    policy     the model that is trained
    reference  a frozen model that the loss pulls the policy towards, for some losses
    rescorer   a frozen model with the weights of a published version, for attribution

All three models get the same micro-batches, so they share one limit of tokens. If the policy or the
reference cannot take packed rows, both take padded rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echo.core.errors import DataError
from echo.train.models.policy import Compute, ModelSource, Policy
from echo.train.models.rescoring import Rescorer, Rescoring


class Models:
    """The trained policy, and the frozen reference and rescorer if they are used."""

    def __init__(
        self,
        source: ModelSource,
        compute: Compute,
        *,
        reference: ModelSource | None,
        rescoring: Rescoring | None,
    ) -> None:
        """Load all models.

        Args:
            source: the model that is trained.
            compute: settings of all models' computations.
            reference: the frozen reference policy; None for no reference.
            rescoring: settings of the rescorer; None for no rescorer.

        Raises:
            DataError: if a model cannot be loaded, or the reference has another vocabulary.
            EngineError: if the model cannot be trained here.
        """
        self.policy = Policy(source, compute)
        self.reference = None if reference is None else self._load_reference(reference)
        self.rescorer = None if rescoring is None else Rescorer(source, compute, rescoring)

    @property
    def compute(self) -> Compute:
        """The settings of the policy's computations, with the present limit of a micro-batch."""
        return self.policy.compute

    def limit_micro_batches(self, num_tokens: int) -> None:
        """Set the limit of tokens in a micro-batch, including padding, for all models."""
        policies = [self.policy]
        if self.reference is not None:
            policies.append(self.reference)
        if self.rescorer is not None:
            policies.append(self.rescorer.policy)
        for policy in policies:
            policy.compute = replace(policy.compute, micro_batch_tokens=num_tokens)

    def _load_reference(self, source: ModelSource) -> Policy:
        compute = replace(self.compute, gradient_checkpointing=False)
        reference = Policy(source, compute, is_frozen=True)
        policy = self.policy
        check_vocabularies(source.model_dir, reference.vocab_size, policy.vocab_size)
        if reference.is_packed != policy.is_packed:
            for one, other in ((reference, policy), (policy, reference)):
                one.pad_rows(f"the reference shares them, and {other.describe_rows()}")
        if not reference.can_share_prompts:
            policy.can_share_prompts = False
        return reference


def check_vocabularies(reference_dir: Path, num_reference: int, num_own: int) -> None:
    """Raise an error if reference and policy differ in their number of token ids.

    Raises:
        DataError: if the numbers differ. The message has both numbers.
    """
    if num_reference != num_own:
        raise DataError(
            f"{reference_dir}: the reference model has {num_reference} token ids, the one being "
            f"trained {num_own}; their tokenizers differ"
        )
