"""Fields that vLLM and SGLang add to OpenAI's bodies and the server has not, with their defaults. Data only.

Null always passes. Read from vLLM's entrypoints/openai/protocol.py (0.10) and SGLang's of the same name (0.5), except
the fields under "not verified". A field that a body has itself is not looked up here.
"""

from scorepool.api.dialects.unsupported import ANY

COMMON: dict[str, object] = {
    # vLLM
    "allowed_token_ids": None,
    "cache_salt": None,
    "guided_choice": None,
    "guided_decoding_backend": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_whitespace_pattern": None,
    "kv_transfer_params": None,
    "logits_processors": None,
    "priority": 0,
    "prompt_logprobs": None,
    "request_id": ANY,
    "structural_tag": None,
    "structured_outputs": None,
    "truncate_prompt_tokens": None,
    "vllm_xargs": None,
    # SGLang
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "custom_logit_processor": None,
    "custom_params": None,
    "ebnf": None,
    "extra_key": None,
    "lora_path": None,
    "no_stop_trim": False,
    "regex": None,
    "return_hidden_states": False,
    "rid": ANY,
    "session_params": None,
    "stop_regex": None,
    # Not verified
    "data_parallel_rank": None,
    "prompt_embeds": None,
    "return_cached_tokens_details": False,
    "return_routed_experts": False,
}

CHAT: dict[str, object] = COMMON | {
    # vLLM
    "best_of": 1,
    "chat_template": None,
    "documents": None,
    "mm_processor_kwargs": None,
    # SGLang
    "max_dynamic_patch": None,
    "min_dynamic_patch": None,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "use_audio_in_video": False,
    # Not verified
    "include_reasoning": True,
    "media_io_kwargs": None,
}

COMPLETIONS: dict[str, object] = COMMON | {
    "response_format": None,
    # SGLang
    "json_schema": None,
}
