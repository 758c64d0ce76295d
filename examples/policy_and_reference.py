"""Prepare a step of reinforcement learning: rollouts of a policy, rewards, and the KL penalty of a reference model.

Here both are the demo model, and the reward is made up. Yours are two names that `scorepool models` lists.

python examples/policy_and_reference.py [URL]
"""

import sys

import numpy as np

from scorepool import Client

POLICY = REFERENCE = "demo"
PROMPTS = ("If the file does not exist,", "def main(")
GROUP = 4
KL_WEIGHT = 0.05


def reward(text: str) -> float:
    return float("\n" not in text)


with Client(*sys.argv[1:]) as client:
    for prompt in PROMPTS:
        rollouts = client.generate(POLICY, prompt, n=GROUP, max_tokens=8, temperature=0.9, seed=1)
        # Ids, not text: entry j of both models then belongs to the same token.
        pairs = [(each.prompt_token_ids, each.token_ids) for each in rollouts.sequences]
        reference = client.score(REFERENCE, pairs)

        rewards = []
        for rollout, scored in zip(rollouts.sequences, reference.sequences, strict=True):
            log_ratio = np.subtract(scored.logprobs, rollout.logprobs)
            kl = (np.exp(log_ratio) - log_ratio - 1).sum()  # never negative; unbiased for rollouts of the policy
            rewards.append(reward(rollout.text) - KL_WEIGHT * float(kl))
        advantages = np.array(rewards) - np.mean(rewards)  # of the group, as in GRPO
        for rollout, advantage in zip(rollouts.sequences, advantages, strict=True):
            print(f"{advantage:5.2f}  {rollout.logprob_sum:8.3f}  {prompt + rollout.text!r}")
    print("weights of the policy:", rollouts.stamp.fingerprint[:12])  # after an update, drop rollouts of the old ones
