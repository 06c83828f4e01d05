"""From documents to batches: packing, order, resuming."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import EOD, corpus_of, documents_in, loader_from, loader_of, same, written
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4c.errors import DataError
from dsv4c.train.data import PackedDataset
from dsv4c.train.tokenizer import BytesTokenizer
from dsv4c.train.tokens import TokenCorpus

# Packing


texts = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=8)
few = settings(max_examples=60, deadline=None)


@few
@given(texts, st.integers(2, 20), st.integers(0, 5), st.integers(1, 3))
def test_every_token_of_every_document_is_an_input_exactly_once_per_epoch(
    texts: list[bytes], seq_len: int, seed: int, epochs: int
) -> None:
    corpus = corpus_of(*texts)
    total = len(corpus.tokens)
    loader = loader_of(corpus, seq_len, batch_size=1, seed=seed)
    stream: list[int] = []
    while len(stream) < epochs * total:
        stream += loader.next_batch()["input_ids"].flatten().tolist()
    for epoch in range(epochs):
        seen, document = [], []
        for token in stream[epoch * total : (epoch + 1) * total]:
            document.append(token)
            if token == EOD:
                seen.append(document)
                document = []
        assert document == []
        assert sorted(seen) == sorted(documents_in(corpus))


@few
@given(texts, st.integers(2, 20), st.integers(0, 5))
def test_a_target_is_the_next_token_of_the_same_document_or_ignored_at_its_end(
    texts: list[bytes], seq_len: int, seed: int
) -> None:
    loader = loader_of(corpus_of(*texts), seq_len, batch_size=1, seed=seed)
    batches = [loader.next_batch() for _ in range(6)]
    inputs = torch.cat([batch["input_ids"] for batch in batches], dim=1)[0].tolist()
    targets = torch.cat([batch["targets"] for batch in batches], dim=1)[0].tolist()
    expected = [-100 if here == EOD else after for here, after in pairwise(inputs)]
    assert targets[:-1] == expected


@few
@given(texts, st.integers(2, 20), st.integers(0, 5))
def test_document_ids_change_after_every_end_of_document_and_never_elsewhere(
    texts: list[bytes], seq_len: int, seed: int
) -> None:
    loader = loader_of(corpus_of(*texts), seq_len, batch_size=4, seed=seed)
    batch = loader.next_batch()
    for inputs, ids in zip(batch["input_ids"].tolist(), batch["document_ids"].tolist(), strict=True):
        assert ids == [inputs[:t].count(EOD) for t in range(seq_len)]


@few
@given(texts, st.integers(2, 20))
def test_every_row_holds_a_target(texts: list[bytes], seq_len: int) -> None:
    batch = loader_of(corpus_of(*texts), seq_len, batch_size=8).next_batch()
    assert (batch["targets"] != -100).any(dim=1).all()


def test_a_document_end_is_known_by_place_and_not_by_the_value_of_its_id() -> None:
    tokens = np.array([7, 256, 8, 256], dtype=np.uint16)  # one document with the end's id inside it
    corpus = TokenCorpus(tokens, np.array([0, 4]), BytesTokenizer(), "corpus")
    batch = loader_of(corpus, seq_len=4, batch_size=1).next_batch()
    assert batch["targets"].tolist() == [[256, 8, 256, -100]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0]]


def test_a_document_cut_by_the_row_has_its_true_next_token_as_last_target() -> None:
    loader = loader_of(corpus_of(b"abcdef"), seq_len=4, batch_size=2)
    batch = loader.next_batch()
    assert batch["input_ids"].tolist() == [[97, 98, 99, 100], [101, 102, EOD, 97]]
    assert batch["targets"].tolist() == [[98, 99, 100, 101], [102, EOD, -100, 98]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


def test_batches_are_int64_of_batch_size_by_seq_len() -> None:
    batch = loader_of(corpus_of(b"abc"), seq_len=5, batch_size=3).next_batch()
    assert sorted(batch) == ["document_ids", "input_ids", "targets"]
    assert {(tuple(value.shape), value.dtype) for value in batch.values()} == {((3, 5), torch.int64)}


def test_a_corpus_shorter_than_a_row_repeats_within_it_as_separate_documents() -> None:
    batch = loader_of(corpus_of(b"a"), seq_len=6, batch_size=1).next_batch()
    assert batch["input_ids"].tolist() == [[97, EOD] * 3]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 2, 2]]


# Order


def test_the_same_seed_gives_the_same_order_and_another_seed_another() -> None:
    corpus = corpus_of(*(bytes([i]) for i in range(50)))
    first, again, other = (loader_of(corpus, seq_len=64, seed=seed).next_batch() for seed in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)


def test_each_epoch_has_an_order_of_its_own() -> None:
    dataset = PackedDataset(corpus_of(*(bytes([i]) for i in range(50))), seq_len=8, seed=0)
    orders = [dataset.order(epoch)[0].tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_order_of_a_seed_is_fixed_for_all_time() -> None:
    dataset = PackedDataset(corpus_of(*(bytes([i]) for i in range(8))), seq_len=8, seed=1)
    assert dataset.order(0)[0].tolist() == [2, 4, 7, 5, 0, 6, 3, 1]


@few
@given(texts, st.integers(2, 12), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_the_ranks_together_draw_what_one_process_draws(
    texts: list[bytes], seq_len: int, batch_size: int, world_size: int, steps: int
) -> None:
    corpus = corpus_of(*texts)
    alone = loader_of(corpus, seq_len, batch_size * world_size)
    ranks = [loader_of(corpus, seq_len, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(steps + 1):
        whole, parts = alone.next_batch(), [rank.next_batch() for rank in ranks]
        for name, rows in whole.items():
            for rank, part in enumerate(parts):
                assert torch.equal(part[name], rows[rank::world_size])
    assert all(rank.state_dict() == alone.state_dict() for rank in ranks)


# Resuming


@few
@given(texts, st.integers(2, 20), st.integers(0, 9), st.integers(0, 5))
def test_a_resumed_loader_continues_bit_for_bit(texts: list[bytes], seq_len: int, steps: int, seed: int) -> None:
    corpus = corpus_of(*texts)
    straight = loader_of(corpus, seq_len, seed=seed)
    for _ in range(steps):
        straight.next_batch()
    resumed = loader_of(corpus, seq_len, seed=seed)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.tokens_seen == straight.tokens_seen
    assert all(same(straight.next_batch(), resumed.next_batch()) for _ in range(4))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seq_len": 16}, "seq_len: saved 8, now 16"),
        ({"seed": 5}, "seed: saved 0, now 5"),
    ],
)
def test_a_position_of_other_settings_is_refused_by_name(changes: dict[str, int], named: str) -> None:
    corpus = corpus_of(b"abc")
    state = loader_of(corpus).state_dict()
    with pytest.raises(DataError, match=named):
        loader_of(corpus, **changes).load_state_dict(state)


def test_a_position_of_another_corpus_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path, "a.txt", "abc")
    state = loader_from([file], cache).state_dict()
    file.write_text("abd")
    with pytest.raises(DataError, match="belongs to another corpus"):
        loader_from([file], cache).load_state_dict(state)


def test_a_position_of_another_tokenizer_is_refused_by_name(
    tmp_path: Path, cache: Path, word_tokenizer: Callable[..., Path]
) -> None:
    file = written(tmp_path, "a.txt", "the cat")
    state = loader_from([file], cache).state_dict()
    with pytest.raises(DataError, match="belongs to another tokenizer"):
        loader_from([file], cache, tokenizer=word_tokenizer("</s>")).load_state_dict(state)


@pytest.mark.parametrize("changes", [{"index": 1}, {"index": -1}, {"offset": 4}, {"offset": -1}, {"epoch": -1}])
def test_a_position_outside_the_corpus_is_refused(changes: dict[str, int]) -> None:
    loader = loader_of(corpus_of(b"abc"))
    with pytest.raises(DataError, match="outside the corpus"):
        loader.load_state_dict(loader.state_dict() | changes)


def test_a_position_with_missing_parts_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="lacks corpus, tokenizer, seq_len, seed, offset"):
        loader_of(corpus_of(b"abc")).load_state_dict({"epoch": 0, "index": 0})
