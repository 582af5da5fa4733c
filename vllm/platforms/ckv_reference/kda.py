# SPDX-License-Identifier: Apache-2.0
"""Torch versions of the KDA (gated delta rule) operations, token by token in float32.

Source of the recurrence: Kimi Linear (arXiv 2510.26692). With key k, value v, query q, per-channel
log decay g and write strength b, one head's state S [V, K] advances as

    S <- S * exp(g);  S <- S + b * (v - S k) k^T;  o = S q

with q and k normalised to length one and q scaled by 1/sqrt(K).
"""

import itertools

import torch

# What the kernels add to a squared norm before the inverse square root.
_NORM_EPSILON = 1e-6
_NULL_STATE = 0


def gate(
    raw: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    """Log decay from raw gate logits.

    raw: (T, H, K), float. a_log: H values. bias: H*K values or None. Returns (T, H, K) float32:
    ``lower_bound * sigmoid(exp(a_log) * (raw + bias))``, or ``-exp(a_log) * softplus(raw + bias)``
    when there is no lower bound.
    """
    heads, dim = raw.shape[-2:]
    x = raw.float()
    if bias is not None:
        x = x + bias.float().reshape(heads, dim)
    a = a_log.float().reshape(heads, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(a * x)
    return -a * torch.nn.functional.softplus(x)


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPSILON)


def _steps(q, k, v, g, beta, state, scale, normalise):
    """Yield (output (H, V), state (H, V, K)) after each token; all arguments float32."""
    if normalise:
        q, k = _normalise(q), _normalise(k)
    q = q * scale
    decay = g.exp()
    for t in range(q.shape[0]):
        state = state * decay[t][:, None, :]
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + (error * beta[t][:, None])[..., None] * k[t][:, None, :]
        yield torch.einsum("hvk,hk->hv", state, q[t]), state


def chunk_kda_with_fused_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill of packed sequences.

    q, k, v: (1, T, H, D). raw_g: T*H*D gate logits. beta: (1, T, H), already a sigmoid.
    initial_state: (R, H, V, K) or None for zeros. cu_seqlens: (R+1,). Returns outputs like v and
    the final states (R, H, V, K) float32.
    """
    tokens, heads, dim = q.shape[1:]
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    g = gate(raw_g.reshape(tokens, heads, dim), A_log, g_bias, lower_bound)
    beta = beta.float().reshape(tokens, heads)
    scale = dim**-0.5 if scale is None else scale
    if initial_state is None:
        final = torch.zeros(len(bounds) - 1, heads, v.shape[-1], dim)
    else:
        final = initial_state.float().clone()
    out = torch.zeros_like(v)
    q, k, v = q[0].float(), k[0].float(), v[0].float()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = slice(start, end)
        steps = _steps(
            q[part], k[part], v[part], g[part], beta[part], final[i], scale, use_qk_l2norm_in_kernel
        )
        for t, (o, state) in enumerate(steps, start):
            out[0, t] = o
            final[i] = state
    return out, final


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: torch.Tensor | None = None,
    g_bias: torch.Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    **_,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode and verification over a state pool, in place.

    q, k, v: (1, T, H, D). g: T*H*D gate logits when ``compute_gate``, else log decays. beta:
    (1, T, H), logits when ``sigmoid_beta``. initial_state: (slots, H, V, K). ssm_state_indices:
    (R,) or (R, tokens per request); with two dimensions each token's state goes to its own slot.
    num_accepted_tokens: (R,) or None; request r resumes from slot column ``accepted - 1``. Slot 0
    is the null block: its requests are skipped. Returns outputs like v and the state pool.
    """
    if (
        cu_seqlens is None
        or ssm_state_indices is None
        or initial_state is None
        or not inplace_final_state
    ):
        raise NotImplementedError("only packed sequences over an indexed state pool are supported")
    tokens, heads, dim = q.shape[1:]
    if out is None:
        out = torch.zeros_like(v)
    g = g.reshape(tokens, heads, dim)
    if compute_gate:
        assert a_log is not None
        g = gate(g, a_log, g_bias, lower_bound)
    else:
        g = g.float()
    beta = beta.float().reshape(tokens, heads)
    beta = torch.sigmoid(beta) if sigmoid_beta else beta
    scale = dim**-0.5 if scale is None else scale
    q, k, v = q[0].float(), k[0].float(), v[0].float()
    slots = ssm_state_indices.tolist()
    bounds = cu_seqlens.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end <= start:
            continue
        row = slots[i] if isinstance(slots[i], list) else [slots[i]] * (end - start)
        first = row[0 if num_accepted_tokens is None else int(num_accepted_tokens[i]) - 1]
        if first <= _NULL_STATE:
            continue
        part = slice(start, end)
        steps = _steps(
            q[part],
            k[part],
            v[part],
            g[part],
            beta[part],
            initial_state[first].float(),
            scale,
            use_qk_l2norm_in_kernel,
        )
        for t, (o, state) in enumerate(steps):
            out[0, start + t] = o.to(out.dtype)
            if row[t] > _NULL_STATE:
                initial_state[row[t]] = state.to(initial_state.dtype)
    return out, initial_state


def gather_initial_states(
    state: torch.Tensor, indices: torch.Tensor, has_initial_state: torch.Tensor
) -> torch.Tensor:
    """Rows ``state[indices]`` (R, ...), zeros where ``has_initial_state`` (R,) is False."""
    rows = state[torch.where(has_initial_state, indices, 0).long()]
    keep = has_initial_state.view(-1, *[1] * (rows.ndim - 1))
    return torch.where(keep, rows, torch.zeros_like(rows))


def scatter_states(state: torch.Tensor, src: torch.Tensor, indices: torch.Tensor) -> None:
    """``state[indices] = src`` in place, cast to the state's dtype."""
    state[indices.long()] = src.to(state.dtype)


# The layer registers the stock kernel's warm-up on the function; nothing is compiled here.
scatter_states.register_warmup = lambda **_: None  # type: ignore[attr-defined]


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    validate_data: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of the depthwise causal convolution, updating the state pool in place.

    x: (R, dim), one token a request, or (T, dim) with ``query_start_loc`` (R+1,). conv_state:
    (slots, dim, >= width-1). weight: (dim, width). With ``num_accepted_tokens`` (R,) the history
    starts at column ``accepted - 1`` and the state keeps every token of the step, so that the next
    step can go back. Requests in slot ``null_block_id`` are skipped. Returns outputs like x.
    """
    if activation not in (None, True, False, "silu", "swish"):
        raise ValueError(f"activation {activation!r} is not one of silu, swish, None")
    if conv_state_indices is None or x.ndim != 2:
        raise NotImplementedError("only (tokens, dim) inputs over an indexed state are supported")
    width = weight.shape[1]
    requests = conv_state_indices.shape[0]
    bounds = list(range(requests + 1)) if query_start_loc is None else query_start_loc.tolist()
    out = torch.empty_like(x) if out is None else out
    for r in range(requests):
        slot, tokens = int(conv_state_indices[r]), x[bounds[r] : bounds[r + 1]]
        if slot == null_block_id or not len(tokens):
            continue
        back = 0 if num_accepted_tokens is None else int(num_accepted_tokens[r]) - 1
        history = conv_state[slot, :, back : back + width - 1]
        window = torch.cat([history, tokens.T.to(conv_state.dtype)], -1)
        y = (window.unfold(-1, width, 1).float() * weight.float()[:, None]).sum(-1)
        if bias is not None:
            y = y + bias.float()[:, None]
        if activation:
            y = torch.nn.functional.silu(y)
        out[bounds[r] : bounds[r + 1]] = y.T.to(out.dtype)
        kept = window[:, 1:] if num_accepted_tokens is not None else window[:, 1 - width :]
        conv_state[slot, :, : kept.shape[1]] = kept
    return out
