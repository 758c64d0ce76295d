"""What rows that decode together are shown of each other's padding."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from scorepool.engine.model import kv_cache as caches


def of_length(num_tokens: int) -> list[KVCache]:
    """One layer, that so many tokens went through."""
    layer = KVCache()
    layer.update_and_fetch(*_tokens(1, num_tokens))
    return [layer]


def test_rows_of_one_length_that_nothing_pads_decode_without_a_mask():
    cache = caches.merged([of_length(6), of_length(6)])
    caches.set_padding(cache, {6})
    assert cache[0].make_mask(1) is None
    assert cache[0].make_mask(1, window_size=7) is None


def test_rows_of_one_length_keep_the_mask_of_their_window():
    cache = caches.merged([of_length(6), of_length(6)])
    caches.set_padding(cache, {6})
    assert cache[0].make_mask(1, window_size=4).squeeze().tolist() == [[False] * 3 + [True] * 4] * 2


def test_rows_of_one_length_are_masked_where_each_is_padded():
    cache = caches.merged([of_length(1), of_length(5)])  # prefixes; then 5 tokens of the first row, 1 of the other
    cache[0].prepare(lengths=[5, 1], right_padding=[0, 4])
    cache[0].update_and_fetch(*_tokens(2, 5))
    cache[0].finalize()
    caches.set_padding(cache, {6})
    assert cache[0].make_mask(1).squeeze().tolist() == [[False] * 4 + [True] * 7] * 2


def test_a_longer_row_that_leaves_takes_the_mask_along():
    cache = caches.merged([of_length(6), of_length(9), of_length(6)])
    caches.set_padding(cache, {6, 9})
    assert cache[0].make_mask(1).squeeze().tolist()[0] == [False] * 3 + [True] * 7
    cache[0].filter(mx.array([0, 2]))
    caches.set_padding(cache, {6})
    assert cache[0].make_mask(1) is None


def _tokens(rows: int, length: int) -> tuple[mx.array, mx.array]:
    """Keys and values of one head."""
    return mx.zeros((rows, 1, length, 2)), mx.zeros((rows, 1, length, 2))
