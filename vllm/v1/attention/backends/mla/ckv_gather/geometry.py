# SPDX-License-Identifier: Apache-2.0
"""Page geometry, record formats, token ownership and capacity. Pure integers, no torch.

Names and formulas, with N ranks, interleave I (tokens) and page size P (tokens of one rank):

* owner of token t: ``(t // I) % N``; its local index: ``(t // (I * N)) * I + t % I``;
* local length of L tokens on rank k: ``L // (I * N) * I + clip(L % (I * N) - k * I, 0, I)``;
* records a rank must be able to hold: ``ceil(MAX / N) + max_num_seqs * I``, rounded up to
  ``P // gcd(P, N)`` because only the concatenation of the N spans has to be whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

INDEX_KEY_BYTES = 128
"""Bytes of one pooled index key: 128 e4m3 values."""

INDEX_RECORD_BYTES = 132
"""Bytes of one index record: the key, then one float32 scale."""

POOLS_PER_INDEX_PAGE = 64
"""Pools in one planar index page: 64 keys, then 64 scales."""

INDEX_PAGE_BYTES = POOLS_PER_INDEX_PAGE * INDEX_RECORD_BYTES
"""Bytes of one planar index page (8,448)."""

MAX_ROW = 2**31 - 1
"""Largest row id: selections hold rows of a cache as int32."""

MAX_VISIBLE_TOKENS = 524_288
"""Largest number of visible tokens that a gather may be asked to hold, over a batch's requests."""

PAGE_MULTIPLE = 64
"""A page size is declared as a multiple of this many tokens."""


def _check_integer(name: str, value: int, minimum: int) -> None:
    # bool is an int to Python; True as a page size is a swapped argument, not a size.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}; convert it on the host first")
    if value < minimum:
        raise ValueError(f"{name} is {value}, the least allowed value is {minimum}; raise it")


@dataclass(frozen=True)
class RecordFormat:
    """How the latent of one token is stored.

    name: the ``--kv-cache-dtype`` that selects it.
    record_bytes: bytes of one record.
    scale_offset: byte at which the scales begin.
    """

    name: str
    record_bytes: int
    scale_offset: int

    def __post_init__(self) -> None:
        _check_integer("record_bytes", self.record_bytes, 1)
        _check_integer("scale_offset", self.scale_offset, 0)
        if self.scale_offset >= self.record_bytes:
            raise ValueError(
                f"scale_offset {self.scale_offset} of record format {self.name!r} is not inside "
                f"its {self.record_bytes} bytes; give the byte at which the scales begin"
            )


FP8_DS_MLA = RecordFormat("fp8_ds_mla", 528, 512)
"""512 e4m3 values, then four float32 scales of 128 values each."""

NVFP4_DS_MLA = RecordFormat("nvfp4_ds_mla", 304, 256)
"""512 packed e2m1 values, 32 e4m3 scales of 16 values each, then one float32 scale in padding."""

FORMATS_ADVICE = (
    f"pass --kv-cache-dtype {FP8_DS_MLA.name}, or {NVFP4_DS_MLA.name} on GPUs of compute "
    "capability 12.x with b12x"
)
"""For errors: the record formats there are. Only b12x's kernels read NVFP4 records on a GPU."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def owner_of(token: int, *, dcp_world_size: int, interleave: int) -> int:
    """Return the rank that stores global token (or pool) ``token`` of a request."""
    return (token // interleave) % dcp_world_size


def local_index_of(token: int, *, dcp_world_size: int, interleave: int) -> int:
    """Return the position of ``token`` among the tokens that its owner stores."""
    return token // (interleave * dcp_world_size) * interleave + token % interleave


def global_index_of(local_index: int, rank: int, *, dcp_world_size: int, interleave: int) -> int:
    """Return the token stored at ``local_index`` on ``rank``: the inverse of the two above."""
    chunk, offset = divmod(local_index, interleave)
    return (chunk * dcp_world_size + rank) * interleave + offset


def local_length(length: int, rank: int, *, dcp_world_size: int, interleave: int) -> int:
    """Return how many of a request's first ``length`` tokens ``rank`` stores."""
    rounds, rest = divmod(length, interleave * dcp_world_size)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def rank_alignment(*, page_size: int, dcp_world_size: int) -> int:
    """Return the multiple of one rank's span that makes N spans a whole number of pages."""
    return page_size // gcd(page_size, dcp_world_size)


def max_index_pages(max_tokens: int, pool_size: int) -> int:
    """Return the planar index pages of one request of ``max_tokens`` tokens."""
    return -(-max_tokens // (pool_size * POOLS_PER_INDEX_PAGE))


def per_rank_capacity(
    *, max_tokens: int, max_num_seqs: int, interleave: int, page_size: int, dcp_world_size: int
) -> int:
    """Return the records one rank can contribute to a gather.

    Enough for every batch of at most ``max_num_seqs`` requests that together see at most
    ``max_tokens`` tokens: one request puts at most ``L / N + I`` records on a rank.

    Raises:
        TypeError, ValueError: an argument is no int, or is below 1.
    """
    for name, value in (
        ("max_tokens", max_tokens),
        ("max_num_seqs", max_num_seqs),
        ("interleave", interleave),
        ("page_size", page_size),
        ("dcp_world_size", dcp_world_size),
    ):
        _check_integer(name, value, 1)
    records = -(-max_tokens // dcp_world_size) + max_num_seqs * interleave
    return _round_up(records, rank_alignment(page_size=page_size, dcp_world_size=dcp_world_size))


@dataclass(frozen=True)
class PageGeometry:
    """The sizes that every plan, buffer and kernel of one process agrees on.

    page_size: tokens in one physical page of one rank, a multiple of 64.
    record: format of the latent records.
    pool_size: tokens per index pool.
    interleave: consecutive tokens on one rank; a multiple of ``pool_size`` that divides
        ``page_size``, so that neither a pool nor a run of tokens crosses an owner or a page.
    dcp_world_size: ranks that share a request.

    Raises:
        TypeError, ValueError: a size is no int, below 1, or breaks a rule above. The message has
            the value, the limit and the remedy.
    """

    page_size: int
    record: RecordFormat
    pool_size: int
    interleave: int
    dcp_world_size: int

    def __post_init__(self) -> None:
        for name in ("page_size", "pool_size", "interleave", "dcp_world_size"):
            _check_integer(name, getattr(self, name), 1)
        if self.page_size % PAGE_MULTIPLE:
            raise ValueError(
                f"page_size {self.page_size} is not a multiple of {PAGE_MULTIPLE} tokens; "
                f"set --block-size to {_round_up(self.page_size, PAGE_MULTIPLE)}"
            )
        if self.interleave % self.pool_size:
            raise ValueError(
                f"interleave {self.interleave} is not a multiple of pool_size {self.pool_size}, "
                "so a pool would be split over ranks; set --cp-kv-cache-interleave-size "
                f"to {_round_up(self.interleave, self.pool_size)}"
            )
        if self.page_size % self.interleave:
            raise ValueError(
                f"interleave {self.interleave} does not divide page_size {self.page_size}; choose "
                f"a divisor of it that is a multiple of pool_size {self.pool_size}"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of the records of one page, without padding between pages."""
        return self.page_size * self.record.record_bytes

    @property
    def pools_per_page(self) -> int:
        """Complete pools in one page of ``page_size`` tokens."""
        return self.page_size // self.pool_size

    @property
    def pool_interleave(self) -> int:
        """Consecutive pools on one rank."""
        return self.interleave // self.pool_size

    @property
    def window_granule(self) -> int:
        """Tokens of a request that fill one page on every rank.

        Windows of a context are a multiple of it, so that each begins with a page on every rank.
        """
        return self.dcp_world_size * self.page_size

    def check_window(self, max_tokens: int, *, max_model_len: int) -> None:
        """Check that buffers for ``max_tokens`` hold a request, or at least a window of one.

        Raises:
            ValueError: they do not. The message has both sides and the remedy.
        """
        least = min(self.window_granule, max_model_len)
        if max_tokens < least:
            raise ValueError(
                f"VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS={max_tokens} holds neither a request of "
                f"max_model_len {max_model_len} nor a window of one, which is a page of "
                f"{self.page_size} tokens on each of {self.dcp_world_size} ranks; set it to at "
                f"least {least}"
            )

    def check_index_page(self) -> None:
        """Check that a page of tokens holds whole planar index pages.

        vLLM cuts the index cache into pages of 64 or 32 pools, whichever divides the block; the
        record layout here knows 64 only.

        Raises:
            ValueError: the page would be cut into index pages of fewer pools. The message has
                both sizes and the block sizes that work.
        """
        tokens = POOLS_PER_INDEX_PAGE * self.pool_size
        if self.page_size % tokens:
            raise ValueError(
                f"page_size {self.page_size} holds {self.pools_per_page} pools, which are not "
                f"whole index pages of {POOLS_PER_INDEX_PAGE} pools ({tokens} tokens); set "
                f"--block-size to a multiple of {tokens}, for example "
                f"{_round_up(self.page_size, tokens)}"
            )

    def capacity(self, *, max_tokens: int, max_num_seqs: int) -> int:
        """Return the latent records one rank can contribute, see :func:`per_rank_capacity`."""
        return per_rank_capacity(
            max_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
            interleave=self.interleave,
            page_size=self.page_size,
            dcp_world_size=self.dcp_world_size,
        )

    def pool_capacity(self, *, max_tokens: int, max_num_seqs: int) -> int:
        """Return the index records one rank can contribute, by the same formula over pools."""
        return per_rank_capacity(
            max_tokens=-(-max_tokens // self.pool_size),
            max_num_seqs=max_num_seqs,
            interleave=self.pool_interleave,
            page_size=POOLS_PER_INDEX_PAGE,
            dcp_world_size=self.dcp_world_size,
        )

    def describe(self) -> str:
        """Return the sizes in one line, for messages."""
        return (
            f"page_size {self.page_size}, record {self.record.name} of "
            f"{self.record.record_bytes} bytes, pool_size {self.pool_size}, "
            f"interleave {self.interleave}, dcp_world_size {self.dcp_world_size}"
        )


class FrozenGeometry:
    """Holds the one geometry of a process once the final page size is known.

    vLLM changes the page size of a hybrid model after the model was loaded, so sizes computed
    early are wrong. Freezing happens when the workspace is reserved; later readers either agree
    with the frozen sizes or fail.
    """

    def __init__(self) -> None:
        self._geometry: PageGeometry | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether :meth:`freeze` has been called."""
        return self._geometry is not None

    def freeze(self, geometry: PageGeometry) -> PageGeometry:
        """Fix ``geometry`` and return it; an equal one may be frozen again.

        Raises:
            RuntimeError: another geometry is frozen already. The message has both.
        """
        if self._geometry is None:
            self._geometry = geometry
        elif self._geometry != geometry:
            raise RuntimeError(
                f"the page geometry is frozen as ({self._geometry.describe()}) and cannot become "
                f"({geometry.describe()}); buffers have been sized for the first. Set the final "
                "--block-size at start, or restart"
            )
        return self._geometry

    def get(self) -> PageGeometry:
        """Return the frozen geometry.

        Raises:
            RuntimeError: nothing is frozen yet.
        """
        if self._geometry is None:
            raise RuntimeError(
                "the page geometry is not frozen yet; reserve the workspace (profiling run) "
                "before a cache is bound or a batch is planned"
            )
        return self._geometry

    def check_cache(self, shape: Sequence[int], stride_bytes: Sequence[int]) -> int:
        """Check a latent cache against the frozen geometry and return its page stride in rows.

        shape: (pages, page_size, record_bytes) of a byte cache.
        stride_bytes: the strides of these three dimensions, in bytes. Pages may be padded (they
            share blocks with other caches), but only by whole records, so that record
            ``page * stride + offset`` exists for every page.

        Raises:
            RuntimeError: nothing is frozen yet.
            ValueError: page size, record width or a stride differs, or the last record has no
                int32 row id. The message has both sides.
        """
        geometry = self.get()
        width = geometry.record.record_bytes
        if len(shape) != 3 or len(stride_bytes) != 3:
            raise ValueError(
                f"the latent cache has shape {tuple(shape)} and byte strides "
                f"{tuple(stride_bytes)}; expected three dimensions "
                f"(pages, {geometry.page_size}, {width})"
            )
        if shape[2] != width:
            raise ValueError(
                f"the latent cache has records of {shape[2]} bytes, the frozen format "
                f"{geometry.record.name} has {width} bytes; start with "
                f"--kv-cache-dtype {geometry.record.name}"
            )
        if shape[1] != geometry.page_size:
            raise ValueError(
                f"the latent cache has pages of {shape[1]} tokens, the frozen page_size is "
                f"{geometry.page_size}; bind the cache that vLLM allocated after the profiling run"
            )
        page_stride, row_stride, byte_stride = stride_bytes
        if byte_stride != 1 or row_stride != width:
            raise ValueError(
                f"the latent cache has record and byte strides of ({row_stride}, {byte_stride}) "
                f"bytes, expected ({width}, 1); bind a cache whose records are contiguous"
            )
        if page_stride < geometry.page_bytes or page_stride % width:
            raise ValueError(
                f"the latent cache has a page stride of {page_stride} bytes, expected at least "
                f"{geometry.page_bytes} and a multiple of the record width {width}; align the "
                "block to whole records"
            )
        last = (shape[0] - 1) * (page_stride // width) + geometry.page_size - 1
        if last > MAX_ROW:
            raise ValueError(
                f"the latent cache has {shape[0]:,} pages, {page_stride:,} bytes apart: its last "
                f"record is row {last:,}, row ids of int32 reach {MAX_ROW:,}; lower "
                "--gpu-memory-utilization or set --num-gpu-blocks-override"
            )
        return page_stride // width

    def check_bound(self, cache: torch.Tensor) -> None:
        """Check a latent cache that vLLM binds, as a byte tensor; see :meth:`check_cache`."""
        self.check_cache(cache.shape, [stride * cache.element_size() for stride in cache.stride()])

    def check_bound_index(self, cache: torch.Tensor) -> None:
        """Check an index cache that vLLM binds: (index pages, 64, 132) bytes, whole planar pages.

        Raises:
            ValueError: pools per page or record width differ. The message has both sides.
        """
        if tuple(cache.shape[1:]) != (POOLS_PER_INDEX_PAGE, INDEX_RECORD_BYTES):
            raise ValueError(
                f"the index cache has shape {tuple(cache.shape)}, expected (pages, "
                f"{POOLS_PER_INDEX_PAGE}, {INDEX_RECORD_BYTES}): vLLM cut the block into pages of "
                f"another size; set --block-size to a multiple of "
                f"{POOLS_PER_INDEX_PAGE * self.get().pool_size}"
            )
