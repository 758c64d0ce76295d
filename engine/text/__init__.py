"""Text and token ids: tokenizer.py for plain text, chat/ for chats. No MLX, no tensors."""
