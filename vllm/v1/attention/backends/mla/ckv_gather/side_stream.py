# SPDX-License-Identifier: Apache-2.0
"""Work beside the current stream; on a CPU it is done at once, where it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One further stream of ``device`` and the end of what it was given last.

    Tensors of the current stream that it uses have to live until :meth:`wait`: the caching
    allocator does not know that it does.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # The blocks of an exchange are few. Behind the many of a selection they would start
            # when that ends.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._end = torch.cuda.Event()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Launch what happens inside behind all that the current stream was given until now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            self._end.record()

    def wait(self) -> None:
        """Make the current stream wait for the end of the last :meth:`run`; the host does not."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._end)
