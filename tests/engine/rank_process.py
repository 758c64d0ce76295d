"""A rank of an engine, for tests: `python -m tests.engine.rank_process FOLDER RANKS IN OUT` under MLX_RANK.

IN and OUT are pickles of sequences, before and after. The first rank runs them and writes those that are done.
"""

import os
import pickle
import sys
from pathlib import Path

from scorepool.engine import Engine, EngineSettings, LoadError
from scorepool.engine.model.load import follow


def main(folder: str, num_ranks: str, given: str, out: str, *options: str) -> None:
    is_first = os.environ["MLX_RANK"] == "0"
    settings = EngineSettings(
        model=folder,
        ranks=int(num_ranks),
        max_batch_tokens=200,
        speculation="ngram" if "ngram" in options or (is_first and "ngram-first" in options) else "off",
    )
    if not is_first:
        try:
            follow(settings)
        except LoadError as error:
            sys.exit(str(error))
        return
    try:
        engine = Engine(settings)
    except LoadError as error:
        sys.exit(str(error))
    sequences = pickle.loads(Path(given).read_bytes())
    for future in [engine.add([sequence]) for sequence in sequences]:
        future.result(100)
    refused = [str(engine.stage_weights(folder, 1).exception(60)), engine.drop_weights().exception(60)]
    done = (sequences, engine.model_info.backend, engine.is_loaded, refused)
    Path(out).write_bytes(pickle.dumps(done))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
