# SPDX-License-Identifier: Apache-2.0
"""Work beside the current stream; on a CPU it is done at once, where it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class SideStream:
    """One further stream of ``device``, whose pieces of work are waited for one by one.

    names: of the pieces, which are done in the order in which they are given.

    Tensors of the current stream that a piece uses have to live until :meth:`wait`: the caching
    allocator does not know that it does.
    """

    def __init__(self, device: torch.device, names: Sequence[str]) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # The blocks of an exchange are few. Behind the many of a projection or a selection they
            # would start when that ends.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._ends = {name: torch.cuda.Event() for name in names}

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Launch what happens inside behind all that both streams were given until now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            self._ends[name].record()

    def wait(self, name: str) -> None:
        """Make the current stream wait for the end of a piece; the host does not."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._ends[name])
