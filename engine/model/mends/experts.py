"""Choose and weigh experts as transformers does. Several of mlx-lm's architectures share code, and so its mistakes.

hidden          [..., width]    any float dtype
logits, scores  [..., experts]  float32
indices         [..., chosen]   the experts that compute a token
weights         [..., chosen]   of their outputs, float32
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx_lm.models.kimi_k3 import KimiK3SparseMoE

from scorepool.engine.errors import LoadError
from scorepool.engine.model.patch_globals import replace_globals

Config = dict[str, Any]
Choice = tuple[mx.array, mx.array]  # indices, weights

ROUTER_BIAS = "e_score_correction_bias"  # decides which experts compute a token
_LEAST_SUM = 1e-20  # of weights that are normalised


@mx.compile
def _choose(scores: mx.array, bias: mx.array, num_chosen: int, num_groups: int, num_kept_groups: int) -> mx.array:
    """Return the experts with the highest biased scores in the best groups: those with the two best experts."""
    biased = scores + bias
    num_dropped = num_groups - num_kept_groups
    if num_dropped > 0:  # Ling may keep more groups than there are
        grouped = mx.unflatten(biased, -1, (num_groups, -1))
        group_scores = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
        dropped = mx.argpartition(group_scores, kth=num_dropped - 1, axis=-2)[..., :num_dropped, :]
        biased = mx.put_along_axis(grouped, dropped, mx.array(-mx.inf), axis=-2).flatten(-2, -1)
    return mx.argpartition(-biased, kth=num_chosen - 1, axis=-1)[..., :num_chosen]


@mx.compile
def _weigh(scores: mx.array, indices: mx.array, normalizes: bool, factor: float) -> mx.array:
    """Return the scores of the chosen experts, divided by their sum if `normalizes`, times the factor."""
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if normalizes:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _LEAST_SUM)
    return weights * factor


class _GroupedRouter:
    """A router by sigmoid, whose scores and choice are computed in float32.

    mlx-lm gives dropped groups a score of 0, which is more than a negative biased score, and it does not normalise the
    weight of a single expert.
    """

    weight: mx.array
    e_score_correction_bias: mx.array
    top_k: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    def prepare(self, config: Config) -> None:
        self.weight = self.weight.astype(mx.float32)

    def __call__(self, hidden: mx.array) -> Choice:
        scores = mx.sigmoid(hidden.astype(mx.float32) @ self.weight.T)
        indices = _choose(scores, self.e_score_correction_bias, self.top_k, self.n_group, self.topk_group)
        return indices, _weigh(scores, indices, self.norm_topk_prob, self.routed_scaling_factor)


class _BailingRouter:
    """A router of Ling 2, by sigmoid or softmax. mlx-lm makes the mistake of the other grouped routers."""

    gate_proj: Any
    expert_bias: mx.array | None
    top_k: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    score_function: str

    def prepare(self, config: Config) -> None:
        _route_in_float32(self.gate_proj)

    def __call__(self, hidden: mx.array) -> Choice:
        logits = self.gate_proj(hidden.astype(mx.float32))
        scores = mx.sigmoid(logits) if self.score_function == "sigmoid" else mx.softmax(logits, axis=-1)
        bias = mx.zeros(scores.shape[-1]) if self.expert_bias is None else self.expert_bias
        indices = _choose(scores, bias, self.top_k, self.n_group, self.topk_group)
        normalizes = self.norm_topk_prob and self.top_k > 1
        weights = _weigh(scores, indices, normalizes, self.routed_scaling_factor)
        return indices, weights.astype(hidden.dtype)  # in which the outputs are summed


class _Experts:
    """A layer of experts whose router is a linear layer."""

    switch_mlp: Any
    shared_experts: Any

    def _sum(self, hidden: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """Return the weighted sum of the experts' outputs [..., width], and of the shared experts'."""
        outputs = self.switch_mlp(hidden, indices)
        summed: mx.array = (outputs * weights[..., None]).sum(axis=-2).astype(hidden.dtype)
        shared = getattr(self, "shared_experts", None)
        return summed if shared is None else summed + shared(hidden)


class _KimiLinearExperts(_Experts):
    """Experts in groups. mlx-lm makes the mistakes of the other grouped routers."""

    gate: Any
    args: Any
    e_score_correction_bias: mx.array

    def prepare(self, config: Config) -> None:
        _route_in_float32(self.gate)

    def __call__(self, hidden: mx.array) -> mx.array:
        args, scores = self.args, mx.sigmoid(self.gate(hidden.astype(mx.float32)))
        groups = args.num_expert_group, args.topk_group
        indices = _choose(scores, self.e_score_correction_bias, args.num_experts_per_token, *groups)
        weights = _weigh(scores, indices, args.moe_renormalize, args.routed_scaling_factor)
        return self._sum(hidden, indices, weights)


class _ErnieExperts(_Experts):
    """Experts chosen by biased scores. mlx-lm drops the bias of ERNIE 4.5's routers."""

    gate: Any
    k: int
    e_score_correction_bias: mx.array
    least_sum: float

    def prepare(self, config: Config) -> None:
        _route_in_float32(self.gate)
        self.least_sum = config["moe_norm_min"]

    def __call__(self, hidden: mx.array) -> mx.array:
        scores = mx.softmax(self.gate(hidden.astype(mx.float32)), axis=-1)
        indices = _choose(scores, self.e_score_correction_bias, self.k, 1, 1)
        weights = mx.take_along_axis(scores, indices, axis=-1)
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), self.least_sum)
        return self._sum(hidden, indices, weights)


class _JambaExperts(_Experts):
    """Experts weighed by a softmax over all of them. mlx-lm computes one over the chosen."""

    router: Any
    num_experts_per_tok: int

    def prepare(self, config: Config) -> None:
        pass

    def __call__(self, hidden: mx.array) -> mx.array:
        scores = mx.softmax(self.router(hidden).astype(mx.float32), axis=-1)
        num_chosen = self.num_experts_per_tok
        indices = mx.argpartition(-scores, kth=num_chosen - 1, axis=-1)[..., :num_chosen]
        weights = mx.take_along_axis(scores, indices, axis=-1).astype(hidden.dtype)
        return self._sum(hidden, indices, weights)


_MENDED: dict[tuple[str, str], type] = {  # by file of mlx_lm.models and name of the class
    ("bailing_moe", "BailingMoeGate"): _BailingRouter,
    ("bailing_moe_linear", "Gate"): _BailingRouter,
    ("deepseek_v3", "MoEGate"): _GroupedRouter,
    ("deepseek_v32", "MoEGate"): _GroupedRouter,
    ("dots1", "Dots1TopkRouter"): _GroupedRouter,
    ("ernie4_5_moe", "Ernie4_5_MoeMLP"): _ErnieExperts,
    ("exaone_moe", "MoEGate"): _GroupedRouter,
    ("glm4_moe", "MoEGate"): _GroupedRouter,
    ("glm4_moe_lite", "MoEGate"): _GroupedRouter,
    ("jamba", "JambaSparseMoeBlock"): _JambaExperts,
    ("kimi_linear", "KimiSparseMoE"): _KimiLinearExperts,
    ("mimo_v2_flash", "MoEGate"): _GroupedRouter,
    ("nemotron_h", "MoEGate"): _GroupedRouter,
}


def mend_routers(model: Any, config: Config, stored: dict[str, mx.array]) -> None:
    """Replace the code that chooses and weighs experts. `stored` has the checkpoint's tensors by name."""
    classes: dict[type, type] = {}
    for path, module in model.named_modules():
        kind = type(module)
        mended = _MENDED.get((kind.__module__.rpartition(".")[2], kind.__name__))
        if mended is not None:
            module.__class__ = classes.setdefault(kind, type(kind.__name__, (mended, kind), {}))
            module.prepare(config)
            if mended is _ErnieExperts:
                module.e_score_correction_bias = _stored_bias(path, stored)


def choose_groups_of_kimi_k3(model: Any, config: Config) -> None:
    """Choose Kimi K3's experts in the best groups. mlx-lm makes the mistake of the other grouped routers."""
    replace_globals(model, KimiK3SparseMoE, _group_expert_select=_select)


def _select(
    logits: mx.array,
    bias: mx.array,
    num_chosen: int,
    num_groups: int,
    num_kept_groups: int,
    factor: float,
    normalizes: bool,
) -> Choice:
    scores = mx.sigmoid(logits.astype(mx.float32))
    indices = _choose(scores, bias.astype(mx.float32), num_chosen, num_groups, num_kept_groups)
    return indices, _weigh(scores, indices, normalizes and num_chosen > 1, factor).astype(logits.dtype)


def _stored_bias(path: str, stored: dict[str, mx.array]) -> mx.array:
    """Return the bias [experts] of the router of a layer of experts; raise LoadError if there is none."""
    for name, bias in stored.items():
        if name.startswith(f"{path}.") and name.endswith(ROUTER_BIAS):
            return bias.reshape(-1).astype(mx.float32)
    raise LoadError(
        f"the checkpoint has no {ROUTER_BIAS} for {path}, which decides which experts compute a token; "
        "mlx-lm's conversions drop it, so serve the original"
    )


def _route_in_float32(router: Any) -> None:
    """Store the weights of a router in float32, unless they are quantised."""
    if type(router) is Linear:
        router.weight = router.weight.astype(mx.float32)
