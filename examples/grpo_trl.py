"""Train with TRL's GRPOTrainer: the server generates, and serves the trained weights from each step to the next.

Needs `pip install trl`. The reward, for short lines, is made up. At other temperatures than 1, start the server with
SCOREPOOL_LOGPROBS_MODE=processed_logprobs.

python examples/grpo_trl.py [URL]
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import scorepool
from scorepool.integrations.trl import weight_sync

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MODEL = "demo"
FOLDER = Path(scorepool.__file__).parent / "models" / MODEL  # the weights that the server was started with


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(text.count("\n")) for text in completions]


with TemporaryDirectory() as output:
    config = GRPOConfig(
        output_dir=output,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=URL,
        num_generations=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_completion_length=16,
        max_steps=3,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        disable_tqdm=True,
    )
    with weight_sync(MODEL):
        prompts = ["If the file does not exist, it is", "Return the number of items in the"]
        trainer = GRPOTrainer(
            str(FOLDER), reward_funcs=reward, args=config, train_dataset=Dataset.from_dict({"prompt": prompts * 8})
        )
    trainer.train()

with scorepool.Client(URL) as client:
    print("version of the weights:", client.weights(MODEL).version)
    for step in trainer.state.log_history[:-1]:
        ratio = step["sampling/importance_sampling_ratio/mean"]  # of the trainer's logprobs to the server's
        print(f"step {step['step']}  reward {step['reward']:.2f}  importance ratio {ratio:.3f}")
    client.push_weights(MODEL, FOLDER)
