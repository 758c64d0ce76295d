"""Print the top-level domains of the internet for store/top_level_domains.txt: `make tlds`.

They are those of the Public Suffix List in the package publicsuffixlist, without the two that have no public hosts.
"""

import re
import sys
from importlib import resources

NO_PUBLIC_HOSTS = {"arpa", "onion"}
HEADER = "# The top-level domains of the internet. `make tlds` writes this file."


def main() -> None:
    """Write one domain a line, in ASCII."""
    text = (resources.files("publicsuffixlist") / "public_suffix_list.dat").read_text("utf-8")
    icann = text.partition("// ===BEGIN ICANN DOMAINS===")[2].partition("// ===END ICANN DOMAINS===")[0]
    rules = re.findall(r"^(?!//)\S+", icann, re.MULTILINE)
    names = {rule.rpartition(".")[2].encode("idna").decode().lower() for rule in rules}
    sys.stdout.write("\n".join([HEADER, *sorted(names - NO_PUBLIC_HOSTS)]) + "\n")


if __name__ == "__main__":
    main()
