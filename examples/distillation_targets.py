"""Make arrays for distillation: at each token of an answer, the teacher's likeliest tokens and their logprobs.

python examples/distillation_targets.py [URL]
"""

import sys
import tempfile

import numpy as np

from scorepool import Client

TOP_K = 16
PAIRS = [("If the file does not exist,", " an error is raised."), ("import", " os\nimport sys\n")]

with Client(*sys.argv[1:]) as client:
    teacher = client.score("demo", PAIRS, top_logprobs=TOP_K)

columns = [sequence.numpy() for sequence in teacher.sequences]
num_tokens = [len(column["token_ids"]) for column in columns]
shape = (len(columns), max(num_tokens))
arrays = {
    "labels": np.full(shape, -100),  # padding that torch's cross_entropy ignores
    "teacher_ids": np.zeros((*shape, TOP_K), np.int64),
    "teacher_logprobs": np.full((*shape, TOP_K), -np.inf, np.float32),
}
for row, (column, length) in enumerate(zip(columns, num_tokens, strict=True)):
    arrays["labels"][row, :length] = column["token_ids"]
    arrays["teacher_ids"][row, :length] = column["top_ids"]
    arrays["teacher_logprobs"][row, :length] = column["top_logprobs"]

with tempfile.TemporaryFile() as file:  # your own: "targets.npz"
    np.savez_compressed(file, fingerprint=teacher.stamp.fingerprint, **arrays)
for name, array in arrays.items():
    print(name, array.dtype, array.shape)
# What the likeliest tokens leave out: the loss of distillation treats it as one more token, or renormalises.
mass = np.exp(arrays["teacher_logprobs"][0, : num_tokens[0]]).sum(axis=-1)
print("probability of the", TOP_K, "likeliest:", *(f"{each:.2f}" for each in mass))
