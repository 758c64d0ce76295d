"""`scorepool certify`: compare a checkpoint's numbers, as the engine serves them, with transformers', on any machine.

rows         token ids to compare: text and random ids
measure      the engine's logprobs for the rows
reference    transformers' logprobs for the same tokens, in float32 and in the served dtype
__main__     the command

The one place that needs torch. Models are loaded one after the other: the engine's, transformers' in float32, and
transformers' in 16 bits.
"""

from scorepool.engine.model import products

products.prepare()  # before a module imports mlx
