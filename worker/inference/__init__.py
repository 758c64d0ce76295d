"""The MLX side of the worker: requests to sequences, sequences to results. Importing it loads no MLX.

batch_worker      the worker class; starts the engine, registers the model
run_inference     the job function; inference_run is one request through the tokenizer and the engine
checkpoints       finished rows of long jobs, for the next worker
tokenizing        jobs in turns on the tokenizer's threads, in the order of owner_turns
translate         wire.Request to Sequences: structured_outputs, template_messages
result            Sequences to wire.Result: columns, classified, chat_answer, provenance
crosschecker      score results compared with those of other workers; crosscheck_mail carries the messages
job_progress      how far jobs of many items are
job_stream        new tokens of a job that streams; token_publisher writes them to Redis
engine_errors     errors of the engine to those of worker/rq
"""
