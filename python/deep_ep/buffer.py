"""deepep.Buffer with the rest of what V1's Buffer has: its runtime object and inter-node names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepep.buffer
from deepep.arguments import Payload
from deepep.buffer import Combined, Dispatched
from deepep.config import Config
from deepep.errors import UnsupportedConfigError
from deepep.events import EventOverlap

from deep_ep.runtime import Runtime


class Buffer(deepep.buffer.Buffer):
    """V1's communicator: deepep.Buffer, whose arguments and methods are V1's already.

    Frameworks that have imported deepep may pass its Buffer wherever one of these is expected; only
    the members below are missing there. The sizes of buffers are accepted and not needed.
    """

    @property
    def runtime(self) -> Runtime | None:
        """What V1's extension object tells about the group; None after destroy()."""
        if self._engine._domain is None:
            return None
        return Runtime(self._engine.device.index)

    def get_local_buffer_tensor(
        self,
        dtype: Any,
        size: Any = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Any:
        """Refused: rows are written straight into results, there is no buffer to look into."""
        raise UnsupportedConfigError(
            "get_local_buffer_tensor: this library has no buffer between sender and result. To "
            "write rows where peers read them, make a tensor with Buffer.empty(*shape, dtype=...)."
        )

    def internode_dispatch(
        self,
        x: Payload,
        handle: Sequence[Any] | None = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:
        """dispatch(), which knows by itself whether there are several nodes."""
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def internode_combine(
        self,
        x: Any,
        handle: Sequence[Any],
        topk_weights: Any = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """combine(), which knows by itself whether there are several nodes."""
        return self.combine(
            x,
            handle,
            topk_weights,
            bias,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )
