# SPDX-License-Identifier: Apache-2.0
"""Rates of the time model to begin a test with."""

from dataclasses import fields

from vllm.v1.attention.backends.mla.ckv_gather.time_model import Rates

CURVES = ("ordinary", "gathered", "own_heads", "all_heads")
"""Rates that are curves."""

NOTHING = Rates(**{f.name: () if f.name in CURVES else 0.0 for f in fields(Rates)})
"""Nothing takes time."""
