"""Images for the models of mlx-lm, which compute texts: the extra `vision`.

file ──codec.py──► tokens, in a text               any thread, with Pillow and the checkpoint's own settings
  └───encoder.py──► features [n, width]            the MLX thread, by the vision tower of mlx-vlm
                        └──model/image_backbone.py──► stand for embeddings of these tokens in a forward pass

The language model, its batches and its caches are those of texts. model/images.py says which checkpoints take images,
and imports these modules, which need the extra, only if one does.

To add a family: a module families/MODEL_TYPE.py with the classes of family.py. Its `injection` says what images change
in the language model: see Injection, and model/image_backbone.py, which does it. And a builder in tests/tiny_vision.py.
"""
