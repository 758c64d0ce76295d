"""transformers finds the same in its files as without our help, and looks once."""

import transformers.models
from transformers.utils.import_utils import create_import_structure_from_path

from scorepool.engine.model import transformers_files


def test_the_second_look_finds_what_transformers_finds_and_reads_no_file():
    models = transformers.models.__file__
    expected = transformers_files._scan(models)
    transformers_files._scan.cache_clear()
    create_import_structure_from_path.cache_clear()
    with_prefix = transformers_files.define_import_structure(transformers_files._MODELS, "models")
    num_read = create_import_structure_from_path.cache_info().misses

    found = transformers_files.define_import_structure(models)

    assert found == expected
    assert create_import_structure_from_path.cache_info().misses == num_read > 100
    assert with_prefix.keys() == found.keys()
