"""The formats in which models write function calls, each with its reader and its grammar. No MLX.

formats          all formats, by the names that vLLM gives them
call_format      the type of a format, and what the grammars share
literal_reader   nested values that are not JSON, read
schema_rules     JSON Schema to the grammar of such values
raw_values       values without quotes: read by their schema's types, and their grammar
the others       one family of formats each

To add a format, add a file or an entry to the file of its family, its name to formats.py, and a sample to
tests/chat_formats.py.
"""
