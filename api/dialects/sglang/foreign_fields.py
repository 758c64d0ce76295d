"""Fields of SGLang's `/generate` that the server has not, with their defaults. Data only.

Null always passes. Written from memory of SGLang's io_struct.py and sampling_params.py (0.5): not verified.
"""

from scorepool.api.dialects.unsupported import ANY

GENERATE: dict[str, object] = {
    "audio_data": None,
    "background": False,
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "conversation_id": None,
    "custom_logit_processor": None,
    "data_parallel_rank": None,
    "extra_key": None,
    "image_data": None,
    "input_embeds": None,
    "log_metrics": ANY,
    "lora_id": None,
    "lora_path": None,
    "modalities": None,
    "no_logs": ANY,
    "priority": None,
    "return_bytes": False,
    "return_entropy": False,
    "return_hidden_states": False,
    "rid": ANY,
    "session_params": None,
    "video_data": None,
    "sampling_params.custom_params": None,
    "sampling_params.ebnf": None,
    "sampling_params.json_schema": None,
    "sampling_params.logit_bias": None,
    "sampling_params.regex": None,
    "sampling_params.stop_regex": None,
    "sampling_params.stream_interval": None,
    "sampling_params.structural_tag": None,
}
