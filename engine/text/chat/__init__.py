"""Chats: render them, constrain the answers and parse them. ChatCodec in codec.py combines these modules.

template            messages and tools to the prompt's text
chat_format         the markers of the model's answers
output_parser       token ids of an answer to channels and spans
tool_parser         the text of a call to its function and arguments
structural_tag      the spelling of answers as grammar fragments
grammar             a request's structured outputs to a grammar
grammar_compiler    a grammar to the bitmask of the tokens that may follow
"""
