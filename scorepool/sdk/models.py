"""The methods of Client for models and for the server itself: those of AsyncModels, blocking."""

import os

from scorepool import wire
from scorepool.sdk.async_models import AsyncModels
from scorepool.sdk.blocking import Blocking


class Models(Blocking):
    """See what is served, and wait until something is."""

    _async: AsyncModels

    def models(self) -> list[wire.ServedModel]:
        """Return the models that live workers serve, one entry per worker. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.models())

    def model(self, name: str) -> wire.Model:
        """Return a model by its name or alias. Raises ScorepoolError, also if no live worker serves it; Unreachable."""
        return self._run(self._async.model(name))

    def tokenizer_info(self, model: str | None = None) -> wire.TokenizerInfo:
        """Return a model's special tokens and chat template; the model may be left out if there is one.

        Raises ScorepoolError, Unreachable.
        """
        return self._run(self._async.tokenizer_info(model))

    def weights(self, model: str) -> wire.WeightsState:
        """Return which version of a model's weights serves, and on which worker. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.weights(model))

    def push_weights(
        self,
        model: str,
        weights: str | os.PathLike[str] | bytes,
        *,
        version: int | None = None,
        label: str | None = None,
        on_running: wire.OnRunning = "finish",
        wait_s: float = 60.0,
    ) -> wire.WeightsState:
        """Have all workers of a model load other weights: a folder on their machines, or bytes of a safetensors file.

        Returns when all serve them, or after `wait_s`: then `state` is not "serving". `version` is greater than
        that which serves, or the next one. Jobs that have begun end on the weights before, or begin anew with
        `on_running` "restart". Raises ScorepoolError, also if a worker refuses the weights; Unreachable.
        """
        return self._run(
            self._async.push_weights(model, weights, version=version, label=label, on_running=on_running, wait_s=wait_s)
        )

    def load_adapter(self, name: str, path: str, *, model: str | None = None, replaces: bool = False) -> None:
        """Load a LoRA adapter from a folder of the workers' machines, on all workers of the model or on none.

        Jobs can name it as their model afterwards. `replaces`: it may take the place of one of the same name. The key
        must be an operator's. Raises ScorepoolError, also with the reason of a worker that refuses it; Unreachable.
        """
        self._run(self._async.load_adapter(name, path, model=model, replaces=replaces))

    def unload_adapter(self, name: str, *, model: str | None = None) -> None:
        """Unload a LoRA adapter from all workers. Jobs that run with it end. Raises ScorepoolError, Unreachable."""
        self._run(self._async.unload_adapter(name, model=model))

    def wait_until_ready(self, timeout_s: float = 60.0) -> list[str]:
        """Wait until a live worker serves a model, and return the names of those served.

        Raises ScorepoolError (503) or Unreachable after `timeout_s`.
        """
        return self._run(self._async.wait_until_ready(timeout_s))

    def metrics(self) -> str:
        """Return the API's metrics in Prometheus's text format. Raises ScorepoolError, Unreachable."""
        return self._run(self._async.metrics())
