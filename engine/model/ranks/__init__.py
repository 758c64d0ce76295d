"""One model on several machines: each rank has a share of every layer, and rank 0 says what runs.

rank 0   scheduler ──► LeadingBatch ──► its own batch            ──► hidden states ──► head, logprobs
                            │ messages        ║ partial sums of each layer
rank 1                      └───► follow() ──► its own batch
"""
