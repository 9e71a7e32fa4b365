"""How far an error of the operators can move the logits, by multiplying worst cases layer after layer.

    δA → δG        C_G = ‖a‖₂ · max |P|·A_LM^(P−1) · iSwiGLU′(U) · ‖W‖₂         per head, `operator_gain`
    δG → head      max ‖q‖ · ‖K‖₂ · ‖V‖₂ / √H                                   per head, `head_factor`
    head → logits  ‖W_O‖√N, both LayerNorms, the feed-forward, all later layers, ‖W_f‖₂     `perturbation_budget`

The first two links can be certified. The last cannot from one prompt: its factors are extrema over the rows that the
prompt visits, while a perturbed prompt visits others, and makes other operators in later layers, which the chain leaves
out. The product is a proxy, and a loose one: 45 orders of magnitude above the published margins of a 110M model. What
it is good for is to say which link is loose.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from plga_jax.array_types import Array
from plga_jax.audit.spectra import singular_values
from plga_jax.models.pldr import PLDR
from plga_jax.models.stacking import over_layers
from plga_jax.ops.power_law import FLOOR

ROUNDING = 2.0**-24
"""Half a unit in the last place of float32, relative."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The chain of one prompt. All are float64; L layers, N heads. Proxies unless they say otherwise."""

    operator_gain: np.ndarray
    """C_G over the observed range of A_LM, [L, N]."""
    operator_gain_floor: np.ndarray
    """C_G with the floor ε_A as the least entry of A_LM, [L, N]."""
    operator_gain_certified: np.ndarray
    """*Bound*, [L, N]: ‖δG‖_F / ‖δA‖_F of any δA up to a float32 rounding of A."""
    head_factor: np.ndarray
    """*Bound*, [L, N]: of a head's output by ‖δG‖₂, at the visited q, k and v."""
    out_norm: np.ndarray
    """*Measured*, [L]: ‖W_O‖₂."""
    attention_norm_gain: np.ndarray
    """Of the LayerNorm after the attention, [L]."""
    ffn_gain: np.ndarray
    """Of the gated feed-forward, [L]."""
    ffn_norm_gain: np.ndarray
    """Of the LayerNorm after it, [L]."""
    attention_gain: np.ndarray
    """Of the attention block by its input, at fixed G, [L]."""
    logits_norm: float
    """*Measured*: ‖W_f‖₂."""
    largest_operator: float
    """*Measured*: max ‖G‖_F."""
    margin: float
    """*Measured*: best less second logit of the last row."""

    @property
    def layer_gain(self) -> np.ndarray:
        """Of a whole layer by its input, [L]."""
        return self._after_attention * (1 + self.attention_gain)

    @property
    def end_to_end(self) -> float:
        """|δ logits| by ‖δG‖, the same in all layers and heads: each layer's injection, through all later layers.

        The head factor is the largest of all layers, as in the published budget.
        """
        later = np.append(np.cumprod(self.layer_gain[:0:-1])[::-1], 1.0)
        heads = np.sqrt(self.head_factor.shape[1]) * self.out_norm
        return float(self.head_factor.max() * np.sum(heads * self._after_attention * later) * self.logits_norm)

    @property
    def radius(self) -> float:
        """ε: a float32 rounding of the largest operator, a hypothetical ‖δG‖."""
        return ROUNDING * self.largest_operator

    @property
    def deviation(self) -> float:
        """B, what the chain allows that radius to do to a logit."""
        return self.end_to_end * self.radius

    def decides(self, margin: float | None = None) -> bool:
        """*Proxy*: whether 2·B < margin, so that no rounding of G could change the choice.

        Args:
            margin: best less second logit; None takes the last row's.

        Returns:
            True if the chain rules a change out.
        """
        return 2 * self.deviation < (self.margin if margin is None else margin)

    @property
    def _after_attention(self) -> np.ndarray:
        return self.attention_norm_gain * (1 + self.ffn_gain) * self.ffn_norm_gain


def perturbation_budget(model: PLDR, tokens) -> Budget:
    """*Proxy*: the chain from an error of the operators to the logits, at what one prompt visits.

    Args:
        model: of learned operators, one per call and head.
        tokens: int [T], without padding.

    Returns:
        A `Budget`.

    Raises:
        ValueError: if the prompt is not one row, the model's operators are constant or made anew within a call, or an
            entry is not finite.

    Source: the certified and sampled perturbation budget of "Power law graph attention: exact generalization of SDPA,
        empirical collapse at inference".
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"tokens must be one row of at least one id, got shape {tokens.shape}")
    if model.config.operator != "learned":
        raise ValueError("the model has constant operators, which no error of A reaches; audit a learned one")
    seen = {name: np.asarray(x, np.float64) for name, x in _visit(model, jnp.asarray(tokens)[None]).items()}
    if not all(np.isfinite(x).all() for x in seen.values()):
        raise ValueError("an entry is not finite; audit the last finite checkpoint")
    if seen["A"].ndim != 4:
        raise ValueError("the budget is of one operator per call and head; audit a model without a cumulative Gram")

    attention, ffn = model.layers.attention, model.layers.ffn
    linears = (attention.query, attention.key, attention.value, attention.out, ffn.gate, ffn.up, ffn.down, model.head)
    W_Q, W_K, W_V, W_O, W_gate, W_up, W_down, W_f = (_norm(part.kernel) for part in linears)
    stage = {name: _float64(getattr(attention.metric, name)) for name in ("W", "b_W", "P", "a")}
    rounding = ROUNDING * np.linalg.norm(seen["A"], axis=(-2, -1))

    # Largest over heads, [L].
    q = _longest_row(seen["q"]).max(axis=-1)
    K, V, G, E = (_norm(x).max(axis=-1) for x in (_heads(seen["k"]), _heads(seen["v"]), seen["G_LM"], seen["E"]))
    scores = (W_Q * G * K + q * G * W_K) / np.sqrt(model.config.head_width)
    return Budget(
        operator_gain=operator_gain(seen["A"], seen["A_LM"], **stage),
        operator_gain_floor=operator_gain(seen["A"], seen["A_LM"], **stage, least=FLOOR),
        operator_gain_certified=certified_operator_gain(seen["A"], **stage, radius=rounding),
        head_factor=head_factor(seen["q"], seen["k"], seen["v"]),
        out_norm=W_O,
        attention_norm_gain=_layer_norm_gain(model.layers.attention_norm, seen["attention_variance"]),
        ffn_gain=W_down * (seen["up"] * silu_slope(seen["gate"]) * W_gate + seen["gated"] * W_up),
        ffn_norm_gain=_layer_norm_gain(model.layers.ffn_norm, seen["ffn_variance"]),
        attention_gain=W_O * np.sqrt(model.config.num_heads) * (scores * V + E * W_V),
        logits_norm=float(W_f),
        largest_operator=float(np.linalg.norm(seen["G_LM"], axis=(-2, -1)).max()),
        margin=float(seen["margin"]),
    )


def operator_gain(A, A_LM, *, W, b_W, P, a, least: float | None = None) -> np.ndarray:
    """*Proxy*: C_G, ‖δG‖_F by ‖δA‖_F, for as long as A_LM and W·A + b_W stay within what was observed.

    Args:
        A: metric tensors, [..., N, H, H].
        A_LM: of the same shape.
        W: [..., N, H, H], likewise `b_W`, `P` and `a`: the weights of the power-law stage.
        b_W: see `W`.
        P: see `W`.
        a: see `W`.
        least: the smallest entry that A_LM may have; None takes the smallest observed in each head.

    Returns:
        [..., N] float64; +inf beyond 1.8e308.
    """
    A, A_LM = np.asarray(A, np.float64), np.asarray(A_LM, np.float64)
    low = A_LM.min(axis=(-2, -1)) if least is None else least
    return _gain(_reach(A, W, b_W), low, A_LM.max(axis=(-2, -1)), W, P, a)


def certified_operator_gain(A, *, W, b_W, P, a, radius) -> np.ndarray:
    """*Bound*: ‖G(A′) − G(A″)‖_F ≤ C·‖A′ − A″‖_F for all A′, A″ within a Frobenius ball around A.

    In the ball |W·A + b_W| ≤ U, so A_LM is between ε_A and iSwiGLU(U) + ε_A, and every slope is at its largest there.

    Args:
        A: metric tensors, [..., N, H, H].
        W: [..., N, H, H], likewise `b_W`, `P` and `a`: the weights of the power-law stage.
        b_W: see `W`.
        P: see `W`.
        a: see `W`.
        radius: of the ball, a number or [..., N].

    Returns:
        C, [..., N] float64; +inf beyond 1.8e308.
    """
    U = _reach(np.asarray(A, np.float64), W, b_W) + _norm(W) * radius
    return _gain(U, FLOOR, U * U / (1 + np.exp(-U)) + FLOOR, W, P, a)


def head_factor(q, k, v) -> np.ndarray:
    """*Bound*: max ‖q_t‖·‖K‖₂·‖V‖₂ / √H: every row of a head's output moves at most this times ‖δG‖₂.

    At fixed q, k and v. A row's scores move by ‖q_t‖‖δG‖‖K‖/√H, a softmax by at most its scores, in the 2-norm.

    Args:
        q: rotated queries, [..., T, N, H].
        k: rotated keys, [..., S, N, H].
        v: values, [..., S, N, H].

    Returns:
        [..., N] float64.
    """
    return _longest_row(q) * _norm(_heads(k)) * _norm(_heads(v)) / np.sqrt(np.shape(q)[-1])


def iswiglu_slope(reach) -> np.ndarray:
    """*Bound*: 2U·σ(U) + U²/4, above the slope of z²·σ(z) on |z| ≤ U.

    Args:
        reach: U ≥ 0.

    Returns:
        float64 of the same shape.
    """
    reach = np.asarray(reach, np.float64)
    return 2 * reach / (1 + np.exp(-reach)) + reach**2 / 4


def silu_slope(reach) -> np.ndarray:
    """*Bound*: σ(U) + U/4, above the slope of z·σ(z) on |z| ≤ U.

    Args:
        reach: U ≥ 0.

    Returns:
        float64 of the same shape.
    """
    reach = np.asarray(reach, np.float64)
    return 1 / (1 + np.exp(-reach)) + reach / 4


@jax.jit
def _visit(model: PLDR, tokens: Array) -> dict[str, Array]:
    """What a prompt [1, T] makes of every layer, and extrema over its rows; the batch axis is dropped."""
    names = ("A", "A_LM", "G_LM", "E", "q", "k", "v")
    logits, out = model(tokens, collect=names)
    seen = {name: getattr(out, name)[:, 0] for name in names}
    best, second = jax.lax.top_k(logits[0, -1], 2)[0]

    def step(x, inputs):
        _, layer, E, v = inputs
        attended = jnp.einsum("NTS,SNH->TNH", E, v.astype(E.dtype)).reshape(x.shape)
        mixed = layer.attention.out(attended).astype(x.dtype) + x
        x = layer.attention_norm(mixed)
        gate, up = layer.ffn.gate(x), layer.ffn.up(x)
        added = layer.ffn(x).astype(x.dtype) + x
        return layer.ffn_norm(added), {
            "attention_variance": mixed.var(axis=-1).min(),
            "gate": jnp.abs(gate).max(),
            "gated": jnp.abs(jax.nn.silu(gate)).max(),
            "up": jnp.abs(up).max(),
            "ffn_variance": added.var(axis=-1).min(),
        }

    x = model.norm(model.embedding[...][tokens[0]] * model.config.model_width**0.5)
    _, extrema = over_layers(step, x, model.layers, seen["E"], seen["v"])
    return seen | extrema | {"margin": best - second}


def _reach(A: np.ndarray, W, b_W) -> np.ndarray:
    """U, the largest |W·A + b_W| of each head."""
    return np.abs(np.asarray(W, np.float64) @ A + np.asarray(b_W, np.float64)).max(axis=(-2, -1))


def _gain(reach, low, high, W, P, a) -> np.ndarray:
    """‖a‖₂ · the steepest power between `low` and `high` · the steepest iSwiGLU within `reach` · ‖W‖₂."""
    P = np.asarray(P, np.float64)
    with np.errstate(over="ignore"):
        # x^(P−1) is monotone, so it is largest at an end.
        ends = np.maximum(*(np.asarray(end)[..., None, None] ** (P - 1) for end in (low, high)))
        power = np.max(np.abs(P) * ends, axis=(-2, -1))
        return _norm(a) * power * iswiglu_slope(reach) * _norm(W)


def _layer_norm_gain(norm, least_variance: np.ndarray) -> np.ndarray:
    """max |γ| / √(v + ε) of each layer."""
    return np.abs(_float64(norm.scale)).max(axis=-1) / np.sqrt(least_variance + norm.epsilon)


def _longest_row(q) -> np.ndarray:
    """[..., T, N, H] -> [..., N]."""
    return np.linalg.norm(np.asarray(q, np.float64), axis=-1).max(axis=-2)


def _heads(x) -> np.ndarray:
    """[..., S, N, H] -> [..., N, S, H]."""
    return np.swapaxes(np.asarray(x), -3, -2)


def _norm(matrices) -> np.ndarray:
    """‖·‖₂ of the last two axes."""
    return singular_values(_float64(matrices))[..., 0]


def _float64(x) -> np.ndarray:
    return np.asarray(x[...], np.float64)
