# SPDX-License-Identifier: Apache-2.0
"""Full-CKV prefill: every rank receives all visible records once per layer.

The modules, from pure integers to the network: ``geometry`` (sizes and ownership), ``eligibility``
(whether a batch gathers), ``layout`` (where each request's records land), ``remap`` (token ids to
gathered rows), ``exchange`` (the collective) and ``workspace`` (the bytes). Nothing is imported
here, so that ``geometry`` and ``eligibility`` stay importable without torch.
"""
