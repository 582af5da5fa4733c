# SPDX-License-Identifier: Apache-2.0
"""The worker: vLLM's CPU worker plus the workspace lifecycle that only its GPU worker has."""

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager, lock_workspace

from vllm.platforms.ckv_reference import ops


class CkvReferenceWorker(CPUWorker):
    """Initialises the workspace, always profiles, and locks the workspace after warm-up."""

    def __init__(self, *args, **kwargs):
        # Before the base class: it calls an operator that only a CPU build of vLLM has.
        ops.install()
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        assert self.device is not None
        init_workspace_manager(self.device)

    def _should_warm_up_model(self) -> bool:
        # This worker calls the profiling run itself, exactly once.
        return False

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, after the profiling run that reserves the workspace.

        The CPU worker skips the run when nothing is compiled and the cache size is given; without
        it an attention backend never sees ``reserve_workspace`` and cannot fix its page geometry.
        """
        self.model_runner.profile_run()
        return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        # From here on any growth is a bug: a GPU would have captured graphs over these addresses.
        lock_workspace()
        return times
