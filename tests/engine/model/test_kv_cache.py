"""Rows that decode together do not attend to each other's padding."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from scorepool.engine.model import kv_cache


def of_length(num_tokens: int) -> list[KVCache]:
    """A cache of one layer that holds `num_tokens` tokens."""
    layer = KVCache()
    layer.update_and_fetch(*_tokens(1, num_tokens))
    return [layer]


def test_unpadded_rows_of_one_length_decode_without_a_mask():
    cache = kv_cache.merge([of_length(6), of_length(6)])
    kv_cache.set_padding(cache, {6})
    assert cache[0].make_mask(1) is None
    assert cache[0].make_mask(1, window_size=7) is None


def test_rows_of_one_length_keep_the_mask_of_their_window():
    cache = kv_cache.merge([of_length(6), of_length(6)])
    kv_cache.set_padding(cache, {6})
    assert cache[0].make_mask(1, window_size=4).squeeze().tolist() == [[False] * 3 + [True] * 4] * 2


def test_padded_rows_of_one_length_are_masked():
    cache = kv_cache.merge([of_length(1), of_length(5)])  # prefixes; then 5 tokens of the first row, 1 of the other
    kv_cache.begin_right_padding(cache, [5, 1])
    cache[0].update_and_fetch(*_tokens(2, 5))
    kv_cache.end_right_padding(cache)
    kv_cache.set_padding(cache, {6})
    assert cache[0].make_mask(1).squeeze().tolist() == [[False] * 4 + [True] * 7] * 2


def test_the_mask_is_gone_once_the_longest_row_has_left():
    cache = kv_cache.merge([of_length(6), of_length(9), of_length(6)])
    kv_cache.set_padding(cache, {6, 9})
    assert cache[0].make_mask(1).squeeze().tolist()[0] == [False] * 3 + [True] * 7
    kv_cache.keep_rows(cache, [0, 2])
    kv_cache.set_padding(cache, {6})
    assert cache[0].make_mask(1) is None


def _tokens(rows: int, length: int) -> tuple[mx.array, mx.array]:
    """Zero keys and values of one head."""
    return mx.zeros((rows, 1, length, 2)), mx.zeros((rows, 1, length, 2))
