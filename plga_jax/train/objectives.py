"""Loss functions of language models, in the form the training step takes."""

from plga_jax.array_types import PRNGKey
from plga_jax.train.losses import DagCoefficients, pldr_loss, segment_weights
from plga_jax.train.step import Batch, LossFn, Objective


def next_token_objective(
    coefficients: DagCoefficients | None = None,
    *,
    pad_id: int = 0,
    num_segments: int | None = None,
) -> LossFn:
    """Next-token cross entropy, plus the DAG losses of a PLDR-LLM's operators.

    Args:
        coefficients: of the DAG losses; None is all 0, which asks the model for no operators.
        pad_id: targets equal to it do not count.
        num_segments: the most documents in a row of batches with "segment_ids".

    Returns:
        A loss function for models called as `model(tokens, collect=)`, with `positions=`,
        `segment_ids=` and `num_segments=` added where the batches have them. Batches have "tokens"
        [B, S] and optionally "segment_ids" and "positions" [B, S]: inputs are all but the last
        column, targets all but the first. Where documents are packed, the last token of one does
        not predict the first of the next.
    """
    coefficients = DagCoefficients() if coefficients is None else coefficients

    def objective(model, batch: Batch, key: PRNGKey) -> Objective:
        del key
        tokens, segments = batch["tokens"], batch.get("segment_ids")
        inputs = {name: batch[name][:, :-1] for name in ("positions", "segment_ids") if name in batch}
        if segments is not None:
            inputs["num_segments"] = num_segments
        logits, out = model(tokens[:, :-1], **inputs, collect=coefficients.names)
        weights = None if segments is None else segment_weights(segments)
        _, parts = pldr_loss(logits, tokens[:, 1:], out, coefficients, pad_id=pad_id, weights=weights)
        penalty = sum(getattr(coefficients, name) * dag for name, dag in parts.dag.items())
        return Objective(
            tokens=parts.tokens,
            penalty=penalty if parts.dag else None,
            means={f"dag_{name}": dag for name, dag in parts.dag.items()},
        )

    return objective
