"""Find the documents of a folder that a model predicts worst, in bits per byte.

python examples/perplexity_folder.py [URL]
"""

import sys
import tempfile
from pathlib import Path

from scorepool import perplexity

DOCUMENTS = {
    "prose.txt": "The file is opened for reading. If the file does not exist, an error is raised.",
    "code.txt": "import os\nimport sys\n\ndef main():\n    return os.path.join('a', 'b')\n",
    "noise.txt": "qx7 zzv 0f3 kkw pq9 vvb x1x rty 8uj",
}

with tempfile.TemporaryDirectory() as folder:
    for name, text in DOCUMENTS.items():
        Path(folder, name).write_text(text)
    corpus = perplexity(folder, model="demo", glob="*.txt", url=sys.argv[1] if sys.argv[1:] else None)

for document in sorted(corpus.documents, key=lambda each: -each["bits_per_byte"]):
    print(f"{document['bits_per_byte']:6.2f}  {document['file']}")
print(f"{corpus.bits_per_byte:6.2f}  all, perplexity {corpus.perplexity:.1f}")
