"""LoRA adapters: low-rank terms beside the layers of one base model, chosen for each row of a batch.

    folder ──peft_format──► AdapterWeights ──placement──► LowRankLayer of each changed layer ──► AdapterBank
             peft_settings                   (checked)        [slots, rank, width]                (selects rows)
           ──mlx_format──►
             mlx_settings

An adapter is computed as peft computes it: y + scale * B(A x), low rank in float32 whatever the dtype of the base, and
cast once. A setting or a tensor that would not be computed so refuses the adapter by name.
"""
