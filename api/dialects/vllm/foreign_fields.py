"""List fields of vLLM's routes that this server does not have, with their defaults. Data only.

Null always passes. Read from vLLM's token_in_token_out/protocol.py and sampling_params.py (0.20 to 0.30), and from
those of its classify and scoring routes.
"""

from scorepool.api.dialects.unsupported import ANY

GENERATE: dict[str, object] = {
    "content_parts": None,
    "ec_transfer_params": None,
    "features": None,
    "kv_transfer_params": None,
    "reasoning_ended": None,
    "reasoning_parser_kwargs": None,
    "token_offsets": ANY,
    "sampling_params.extra_args": None,
    "sampling_params.flat_logprobs": False,
    "sampling_params.prompt_logprob_start": None,
    "sampling_params.prompt_logprob_token_ids": None,
    "sampling_params.repetition_detection": None,
    "sampling_params.routed_experts_prompt_start": 0,
    "sampling_params.skip_clone": ANY,
    "sampling_params.skip_reading_prefix_cache": ANY,
    "sampling_params.stream_interval": None,
    "sampling_params.thinking_token_budget": None,
    "sampling_params.trace_decode_token_ids": None,
}

# Of `/classify`, `/score` and `/rerank`.
POOLING: dict[str, object] = {
    "activation": True,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "max_tokens_per_doc": 0,
    "max_tokens_per_query": 0,
    "mm_processor_kwargs": None,
    "padding": None,
    "request_id": ANY,
    "softmax": True,
    "user": ANY,
}
CLASSIFY = {name: default for name, default in POOLING.items() if name != "activation"}
