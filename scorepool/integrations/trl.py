"""Let TRL's trainers generate with a scorepool server, and push their weights to it.

With vllm_mode="server" they send them over NCCL, which no Mac has. Here they send them to
`POST /v1/models/{model}/weights`. All other requests are TRL's own.

    with weight_sync("policy"):
        trainer = GRPOTrainer(...)
    trainer.train()
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save
from trl.generation import vllm_client, vllm_generation

from scorepool import wire
from scorepool.sdk import Client, ScorepoolError, Unreachable


class PushingClient(vllm_client.VLLMClient):
    """TRL's client, except that it pushes weights to a model of scorepool."""

    def __init__(self, *, policy: str | None, wait_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.model, self._wait_s = policy or self.model, wait_s

    def init_communicator(self, device: Any = 0) -> None:
        """Check that the model is served. There is no group to join. Raises ScorepoolError."""
        with Client(self.base_url) as client:
            client.weights(self.model)

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push all tensors of the model, and return when all workers serve them. Raises RuntimeError, ScorepoolError.

        Each tensor is copied when the iterator yields it, because TRL then shards it again or unmerges its adapter.
        """
        content = save({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_params})
        deadline = time.monotonic() + self._wait_s
        with Client(self.base_url) as client:
            read = partial(client.weights, self.model)
            before = _when_served(read, deadline).version
            push = partial(client.push_weights, self.model, content, wait_s=self._wait_s)
            state = _pushed(push, read, before, deadline)
            while state.state != "serving" and time.monotonic() < deadline:
                time.sleep(0.2)
                state = _when_served(read, deadline)
        if state.version <= before or state.state != "serving":
            reason = state.error or f"version {state.version} is {state.state} after {self._wait_s:g} s"
            raise RuntimeError(f"{self.model} does not serve the pushed weights: {reason}")


def _when_served(call: Callable[[], wire.WeightsState], deadline: float) -> wire.WeightsState:
    """Repeat a call while no worker of the model lives. One that was killed comes back."""
    while True:
        try:
            return call()
        except ScorepoolError as error:
            if error.status != 404 or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _pushed(
    push: Callable[[], wire.WeightsState], read: Callable[[], wire.WeightsState], before: int, deadline: float
) -> wire.WeightsState:
    """Push weights, again if the reply was lost and no version after `before` is there or loading. Return the state."""
    while True:
        try:
            return _when_served(push, deadline)
        except (ScorepoolError, Unreachable) as error:
            if not error.may_be_done or time.monotonic() > deadline:
                raise
        state = _when_served(read, deadline)
        if state.version > before or state.state == "loading":
            return state
        time.sleep(0.2)


@contextmanager
def weight_sync(model: str | None = None, *, wait_s: float = 600.0) -> Iterator[None]:
    """Have trainers that are built in this context push to a model, or to the first one that the server lists.

    A push may take `wait_s`, with the restart of a worker. In this context TRL believes that vLLM is installed.
    """
    with (
        patch.object(vllm_client, "is_vllm_available", return_value=True),
        patch.object(vllm_generation, "is_vllm_available", return_value=True),
        patch.object(vllm_generation, "VLLMClient", partial(PushingClient, policy=model, wait_s=wait_s)),
    ):
        yield
