"""Images for the models of mlx-lm, which compute texts: the extra `vision`.

file ──codec.py──► tokens, in a text               any thread, with Pillow and the checkpoint's own settings
  └───encoder.py──► features [n, width]            the MLX thread, by the vision tower of mlx-vlm
                        └──model/image_backbone.py──► stand for embeddings of these tokens in a forward pass

The language model, its batches and its caches are those of texts. model/images.py says which checkpoints take images,
and imports these modules, which need the extra, only if one does.

To add a family: a module like mistral3.py, and its entry in model/images.py. One whose positions have several axes has
`sections` too, as qwen2_5_vl.py does: see model/axial_positions.py.
"""
