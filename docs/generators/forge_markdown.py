"""Let the site show what a forge shows: a hook of MkDocs.

Markdown in the repository is GitHub's. Python-Markdown, which MkDocs uses, differs in two places: a code block in a
list item is indented by four spaces and followed by an empty line, and `|` has no backslash in the code of a table.
"""

import re
from typing import Any

FENCE_IN_LIST = re.compile(r"^( {2,3})```.*?^\1```$", re.MULTILINE | re.DOTALL)
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite these two."""
    markdown = FENCE_IN_LIST.sub(lambda block: re.sub(r"^(?=.)", "  ", block[0], flags=re.MULTILINE) + "\n", markdown)
    return TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)
