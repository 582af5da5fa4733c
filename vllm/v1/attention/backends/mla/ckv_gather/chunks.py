# SPDX-License-Identifier: Apache-2.0
"""How vLLM cuts long prompts into chunks while prefix caching is on. Pure integers, no torch.

The states of KDA layers are cached at ends of chunks, so in its mamba cache mode "align", the one
that prefix caching brings, vLLM ends chunks where pages end. That is the page of one rank, with any
decode context parallelism: states are not shared out. A budget that is no multiple of a page is not
filled, and decodes take theirs first. Nothing of this depends on the gather; larger chunks serve
both paths.
"""

from __future__ import annotations

ENOUGH = 0.9
"""Nothing is said about chunks that fill this part of what decodes leave of the budget."""


def average_chunk(page: int, budget: int, decode_tokens: int = 0) -> float:
    """Tokens in a chunk of a long prompt, on average, that is computed alone or beside decodes.

    page: tokens in a page of one rank. budget: tokens in a step, ``--max-num-batched-tokens``.
    decode_tokens: of the budget, taken by decodes in every step.

    Returns:
        whole pages, if the budget holds one. Less, if it holds none: a page is then computed in
        several chunks, of which the last one ends with it. 0: the prompt waits, because the budget
        holds a page and the decodes leave less.
    """
    left = budget - decode_tokens
    if left < 1:
        return 0
    return left // page * page if page <= budget else page / -(-page // left)


def filled_budget(page: int, budget: int, decode_tokens: int) -> int:
    """The least budget, from ``budget`` up, whose chunks fill what ``decode_tokens`` leave."""
    left = max(budget - decode_tokens, 1)
    if budget < page:
        # The most parts of at least so many tokens.
        parts = (page - 1) // (left - 1) if left > 1 else page
        part = -(-page // parts) + decode_tokens
        # A budget that holds a page has no parts of one: it needs room for a whole one.
        if part < page:
            return part
    return -(-left // page) * page + decode_tokens


def remark(
    page: int, budget: int, decode_tokens: int, flag: str = "--max-num-batched-tokens"
) -> str | None:
    """What there is to say about chunks, and which budget is better; None if they fill it.

    page, budget: see :func:`average_chunk`. decode_tokens: the most that decodes may take.
    flag: that sets the budget.
    """
    better = filled_budget(page, budget, decode_tokens)
    chunk = average_chunk(page, budget, decode_tokens)
    if better == budget or chunk >= ENOUGH * max(budget - decode_tokens, 1):
        return None
    alone = average_chunk(page, budget)
    text = f"prefix caching cuts chunks at pages of {page:,} tokens: {alone:,.0f} of {budget:,}"
    if page > budget:
        text += " on average"
    # What chunks leave of the budget; decodes that need more make chunks smaller.
    spare = int(budget - alone)
    if spare < decode_tokens:
        less = average_chunk(page, budget, spare + 1)
        text += f", {less:,.0f}" if less else ", none"
        text += f" beside more than {spare:,} tokens of decodes" if spare else " beside any decode"
    return (
        f"{text}; {flag} {better} makes that {average_chunk(page, better, decode_tokens):,.0f} "
        f"beside up to {decode_tokens:,} tokens of decodes"
    )
