# SPDX-License-Identifier: Apache-2.0
"""N ranks in one process, one at a time, that meet in collectives.

A rank is a greenlet: rank 0 runs until its next collective or its end, then rank 1, and so on. When
all have stopped, the collective moves the data, or :class:`Mismatch` says which rank stands where.
Nothing depends on timing, so a run repeats exactly. Threads would do, too, but every handover would
wait for a busy machine, and OpenMP would give each of them a team of its own that outlives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet


class Mismatch(AssertionError):
    """The ranks do not stand in the same collective: real ones would wait for each other."""


@dataclass(frozen=True)
class Call:
    """One collective as one rank enters it. Two ranks match if their calls are equal.

    name: the operation. sent, received: bytes of the whole tensors of this rank.
    """

    name: str
    sent: int
    received: int


class _Rank(greenlet):
    def __init__(self, number: int, function: Callable[[int], Any], saved: list[Any]) -> None:
        super().__init__(function)
        self.number = number
        self.saved = saved
        self.call: Call | None = None
        self.tensors: tuple[Any, ...] = ()
        self.result: Any = None


class Lockstep:
    """See the module's description.

    world: ranks. globals_per_rank: (module, attribute) pairs that every rank has a value of its
        own for, though the process has one: they are exchanged when another rank runs.
    """

    def __init__(self, world: int, globals_per_rank: Sequence[tuple[Any, str]] = ()) -> None:
        self.world = world
        self.globals_per_rank = list(globals_per_rank)
        self.calls: list[list[Call]] = [[] for _ in range(world)]
        self._current: _Rank | None = None

    @property
    def rank(self) -> int:
        """The rank that runs."""
        assert self._current is not None, "no rank runs"
        return self._current.number

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call ``function(rank)`` on every rank and return the results in rank order.

        Raises:
            Mismatch: the ranks do not enter the same collectives.
            BaseException: what a rank raised, if it was the first to stop the others.
        """
        before = self._values()
        ranks = [_Rank(number, function, list(before)) for number in range(self.world)]
        try:
            while not all(rank.dead for rank in ranks):
                for rank in ranks:
                    if not rank.dead:
                        self._resume(rank)
                self._meet(ranks)
        finally:
            for rank in ranks:
                if not rank.dead:
                    # Ends it in the collective that will not happen.
                    self._resume(rank, abort=True)
            self._set(before)
        return [rank.result for rank in ranks]

    def collective(self, name: str, own: torch.Tensor | None, *tensors: Any) -> None:
        """Stop the running rank until all ranks have entered the same collective.

        own: what it sends. tensors: what the operation needs more; the received one comes first.
        """
        rank = self._current
        assert rank is not None, "a collective outside of Lockstep.run"
        received = tensors[0].nbytes if isinstance(tensors[0], torch.Tensor) else 0
        rank.call = Call(name, 0 if own is None else own.nbytes, received)
        rank.tensors = (own, *tensors)
        self.calls[rank.number].append(rank.call)
        rank.parent.switch()

    def _resume(self, rank: _Rank, *, abort: bool = False) -> None:
        self._set(rank.saved)
        self._current = rank
        rank.call = None
        try:
            rank.result = rank.throw() if abort else rank.switch(rank.number)
        finally:
            self._current = None
            rank.saved = self._values()

    def _values(self) -> list[Any]:
        return [getattr(module, name) for module, name in self.globals_per_rank]

    def _set(self, values: Sequence[Any]) -> None:
        for (module, name), value in zip(self.globals_per_rank, values, strict=True):
            setattr(module, name, value)

    def _meet(self, ranks: list[_Rank]) -> None:
        if all(rank.dead for rank in ranks):
            return
        if any(rank.call != ranks[0].call for rank in ranks):
            where = "; ".join(f"rank {rank.number}: {rank.call or 'has ended'}" for rank in ranks)
            raise Mismatch(f"the ranks do not meet: {where}")
        assert ranks[0].call is not None
        _MOVES[ranks[0].call.name]([rank.tensors for rank in ranks])


def _all_gather(per_rank: list[tuple[Any, ...]]) -> None:
    # The send buffer may be a view of the receive buffer.
    every = torch.cat([own.reshape(-1) for own, _ in per_rank])
    for _, received in per_rank:
        received.view(-1).copy_(every)


def _all_to_all(per_rank: list[tuple[Any, ...]]) -> None:
    sent = torch.stack([own for own, _ in per_rank])
    for number, (_, received) in enumerate(per_rank):
        received.copy_(sent[:, number])


def _all_gather_object(per_rank: list[tuple[Any, ...]]) -> None:
    objects = [value for _, _, value in per_rank]
    for _, received, _ in per_rank:
        received[:] = objects


_MOVES = {
    "all_gather_into_tensor": _all_gather,
    "all_to_all_single": _all_to_all,
    "all_gather_object": _all_gather_object,
}


class LockstepDist:
    """Stands in for ``torch.distributed``: what the exchange calls of it, and nothing else."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep

    def get_world_size(self, group: Any) -> int:
        return self.lockstep.world

    def get_rank(self, group: Any) -> int:
        return self.lockstep.rank

    def all_gather_into_tensor(
        self, output: torch.Tensor, own: torch.Tensor, group: Any = None
    ) -> None:
        # As gloo has it: NCCL looks at the number of elements alone.
        assert output.shape == (self.lockstep.world * own.shape[0], *own.shape[1:])
        assert output.dtype == own.dtype and output.is_contiguous() and own.is_contiguous()
        self.lockstep.collective("all_gather_into_tensor", own, output)

    def all_to_all_single(self, output: torch.Tensor, sent: torch.Tensor, group: Any = None):
        assert output.shape == sent.shape and sent.shape[0] == self.lockstep.world
        self.lockstep.collective("all_to_all_single", sent, output)

    def all_gather_object(self, every: list[Any], value: Any, group: Any = None) -> None:
        self.lockstep.collective("all_gather_object", None, every, value)


class LockstepGroup:
    """Stands in for vLLM's DCP group on every rank of a :class:`Lockstep`."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
        self.world_size = lockstep.world
        self.device_group = self.cpu_group = object()

    @property
    def rank_in_group(self) -> int:
        return self.lockstep.rank


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]):
    """Set attributes, (module, name, value) each, and restore them at the end."""
    before = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    try:
        for module, name, value in replacements:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
