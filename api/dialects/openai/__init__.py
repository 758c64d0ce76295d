"""OpenAI's dialect: its messages, and their translation into wire requests and out of wire results. Pure."""
