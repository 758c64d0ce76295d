"""List fields of requests that this server does not have, with their defaults: those of OpenAI's other route, of vLLM
and of SGLang. Data only.

Null always passes. Read from vLLM's entrypoints/openai/protocol.py (0.10), from its chat_completion, completion and
tokenize protocols of later releases, and from SGLang's entrypoints/openai/protocol.py (0.5 and later). A field that a
body has itself is not looked up here.
"""

from scorepool.api.dialects.unsupported import ANY

COMMON: dict[str, object] = {
    # vLLM
    "ec_transfer_params": None,
    "guided_choice": None,
    "guided_decoding_backend": ANY,  # forms are always followed by llguidance
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_whitespace_pattern": None,
    "kv_transfer_params": None,
    "logits_processors": None,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "request_id": ANY,
    "return_token_offsets": False,
    "structural_tag": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "vllm_xargs": None,
    # SGLang
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "custom_logit_processor": None,
    "custom_params": None,
    "data_parallel_rank": None,
    "disagg_prefill_dp_rank": None,
    "ebnf": None,
    "extra_key": None,
    "images_config": None,
    "lora_path": None,
    "no_stop_trim": False,
    "regex": None,
    "return_cached_tokens_details": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "rid": ANY,
    "routed_dp_rank": None,
    "routed_experts_start_len": 0,
    "session_id": None,
    "session_params": None,
    "stop_regex": None,
}

CHAT: dict[str, object] = COMMON | {
    # /v1/completions
    "best_of": 1,
    "prompt": None,
    "suffix": None,
    # vLLM
    "chat_template": None,
    "documents": None,
    "include_reasoning": True,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "return_assistant_tokens_mask": False,
    "return_prompt_text": False,
    # SGLang
    "input_ids": None,
    "max_dynamic_patch": None,
    "min_dynamic_patch": None,
    "reasoning": None,
    "return_meta_info": False,
    "return_prompt_token_ids": False,
    "return_sampling_mask": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "task": None,
    "use_audio_in_video": False,
}

RESPONSES: dict[str, object] = CHAT | {
    "client_metadata": ANY,  # of the program that asks, as Codex sends it
}

COMPLETIONS: dict[str, object] = COMMON | {
    # /v1/chat/completions
    "add_generation_prompt": True,
    "audio": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "function_call": None,
    "functions": None,
    "max_completion_tokens": None,
    "messages": None,
    "metadata": None,
    "modalities": ["text"],
    "moderation": None,
    "parallel_tool_calls": True,
    "prediction": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": "in_memory",
    "reasoning_effort": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "verbosity": "medium",
    "web_search_options": None,
    # vLLM
    "prompt_embeds": None,
    # SGLang
    "custom_labels": None,
    "json_schema": None,
}

TOKENIZE: dict[str, object] = {
    # vLLM
    "chat_template": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    # SGLang
    "reasoning_effort": None,
    "tool_choice": None,
}

EMBEDDINGS: dict[str, object] = {
    # vLLM
    "additional_data": None,
    "cache_salt": None,
    "messages": None,
    "mm_processor_kwargs": None,
    "normalize": True,
    "request_id": ANY,
    # SGLang
    "lora_path": None,
    "rid": ANY,
}
