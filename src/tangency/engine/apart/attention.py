"""nn.MultiheadAttention taken apart into linear layers, so that their rules cover it."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def covers(
    query: Tensor, dropout_p: float, training: bool, add_zero_attn: bool, arguments: Mapping[str, object]
) -> bool:
    """What `attend` covers: everything but added key/value biases, zero attention and static keys."""
    unusual = ("bias_k", "bias_v", "static_k", "static_v")
    dropout = dropout_p > 0 and training
    return query.dim() == 3 and not add_zero_attn and not dropout and all(arguments[k] is None for k in unusual)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    use_separate_proj_weight: bool,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    v_proj_weight: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward in terms of F.linear, so that its projections become taps. Tensors [t, n, e]."""
    t, n, e = query.shape
    s, heads = key.shape[0], num_heads
    if use_separate_proj_weight:
        # The packed bias [3e] belongs to three products: read by each through the same tap as a broadcast sum.
        zero = query.new_zeros(3 * e)
        bias = zero if in_proj_bias is None else zero.expand(1, n, -1) + in_proj_bias
        weights_of = ((query, q_proj_weight), (key, k_proj_weight), (value, v_proj_weight))
        projected = [F.linear(v, w) for v, w in weights_of]  # type: ignore[arg-type]
        q, k, v = (p + b for p, b in zip(projected, bias.split(e, -1), strict=True))
    elif query is key and key is value:
        q, k, v = F.linear(query, in_proj_weight, in_proj_bias).split(e, -1)  # type: ignore[arg-type]
    else:
        # All three projections of each, of which one is used: the weight then has one tap per input, not three slices.
        packed = (F.linear(v, in_proj_weight, in_proj_bias) for v in (query, key, value))  # type: ignore[arg-type]
        q, k, v = (p[..., j * e : (j + 1) * e] for j, p in enumerate(packed))
    q, k, v = (p.reshape(p.shape[0], n, heads, -1).permute(1, 2, 0, 3) for p in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, q, s, n, heads)
    if not need_weights:
        y = F.scaled_dot_product_attention(q, k, v, mask)
        weights = None
    else:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        y = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    y = y.permute(2, 0, 1, 3).reshape(t, n, -1)
    return F.linear(y, out_proj_weight, out_proj_bias), weights


def _mask(attn: Tensor | None, padding: Tensor | None, q: Tensor, s: int, n: int, heads: int) -> Tensor | None:
    """Both masks as one float mask that is added to the scores [n, heads, t, s]."""

    def floating(m: Tensor) -> Tensor:
        """Masks of booleans become 0 and −∞, which are added to the scores."""
        return q.new_zeros(m.shape).masked_fill(m, float("-inf")) if m.dtype == torch.bool else m.to(q.dtype)

    total = None
    if attn is not None:
        attn = floating(attn)
        total = attn.view(n, heads, -1, s) if attn.dim() == 3 else attn
    if padding is not None:
        extra = floating(padding)[:, None, None]
        total = extra if total is None else total + extra
    return total
