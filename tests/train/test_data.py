"""The way of the data from files to batches: packing, order, resuming, cache, tokenizers, and what is refused how."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HubTokenizer

from dsv4c.errors import DataError
from dsv4c.train import documents as documents_module
from dsv4c.train import tokens as tokens_module
from dsv4c.train.data import Loader, PackedDataset, make_loader
from dsv4c.train.sources import find_sources
from dsv4c.train.tokenizer import BytesTokenizer, JsonTokenizer, load_tokenizer
from dsv4c.train.tokens import TokenCorpus, open_corpus

EOD = 256


def corpus_of(*texts: bytes) -> TokenCorpus:
    rows = [[*text, EOD] for text in texts]
    tokens = np.array([token for row in rows for token in row], dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return TokenCorpus(tokens, offsets, BytesTokenizer(), "corpus")


def loader_of(corpus: TokenCorpus, seq_len: int = 8, batch_size: int = 2, seed: int = 0, **ranks: int) -> Loader:
    return Loader(PackedDataset(corpus, seq_len=seq_len, seed=seed), batch_size=batch_size, **ranks)


def loader_from(paths: object, cache: Path, **changes: object) -> Loader:
    arguments = {"tokenizer": "bytes", "seq_len": 8, "batch_size": 2, "seed": 0, "cache_dir": cache, "vocab_size": 257}
    return make_loader(paths, **(arguments | changes))  # type: ignore[arg-type]  # any mixture, wrong ones too


def opened(*paths: Path, cache: Path, **changes: object) -> TokenCorpus:
    return loader_from(list(paths), cache, **changes).dataset.corpus


def documents_in(corpus: TokenCorpus) -> list[list[int]]:
    return [corpus.tokens[a:b].tolist() for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]


def written(folder: Path, name: str, content: bytes | str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer.json of whole words; ``special`` are its special tokens."""

    def write(*special: str, unknown: bool = True, bos: bool = False, max_length: int | None = None) -> Path:
        words = ["the", "cat", "sat", "|", "<", ">", "endoftext", "s", "/"] + (["[UNK]"] if unknown else [])
        model = models.WordLevel(
            {word: id for id, word in enumerate(words)}, **({"unk_token": "[UNK]"} if unknown else {})
        )
        tokenizer = HubTokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        if bos:
            id = tokenizer.token_to_id(special[0])
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{special[0]} $A", special_tokens=[(special[0], id)]
            )
        if max_length is not None:
            tokenizer.enable_truncation(max_length)
            tokenizer.enable_padding(length=max_length)
        file = tmp_path / "tokenizer.json"
        tokenizer.save(str(file))
        return file

    return write


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


# Sources


def test_a_folder_is_read_recursively_in_sorted_order_without_hidden_and_foreign_files(
    tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "data"
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/c.txt", "d.bin", "c.PY", "meta.json"):
        written(folder, name, name)
    corpus = opened(folder, cache=cache)
    assert [bytes(document[:-1]).decode() for document in documents_in(corpus)] == ["a/z.md", "b.txt", "c.PY"]


def test_each_json_line_is_a_document_and_blank_lines_are_none(tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path, "a.jsonl", '\ufeff{"body": "ä"}\r\n\n{"body": ""}\n{"id": 3, "body": "b\\nc"}')
    corpus = opened(file, cache=cache, text_field="body")
    assert documents_in(corpus) == [[*"ä".encode(), EOD], [*b"b\nc", EOD]]


def test_without_paths_the_standard_library_is_read_and_its_tests_are_not() -> None:
    files = [source.path for source in find_sources(None)]
    names = {file.name for file in files}
    assert {"dataclasses.py", "argparse.py"} <= names
    assert len(files) > 300
    assert not any({"site-packages", "test", "tests"} & set(file.parts) for file in files)


def test_the_bytes_tokenizer_accepts_any_byte(tmp_path: Path, cache: Path) -> None:
    everything = bytes(range(256))
    assert documents_in(opened(written(tmp_path, "a.txt", everything), cache=cache)) == [[*everything, EOD]]


@pytest.mark.parametrize("text", [b"one\ntwo words\n\nthree", b"x" * 40, b"", "ääääää€€€".encode(), b"12345678"])
@pytest.mark.parametrize("piece_bytes", [4, 8])
def test_a_document_read_in_pieces_is_the_same_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, piece_bytes: int
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", piece_bytes)
    source = find_sources(written(tmp_path, "a.txt", text))[0]
    pieces = list(documents_module.read_pieces(source, "text"))
    assert b"".join(piece.data for piece in pieces) == text
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.line for piece in pieces] == [
        1 + b"".join(before.data for before in pieces[:i]).count(b"\n") for i in range(len(pieces))
    ]
    for piece in pieces:
        piece.data.decode()  # no character is cut


# Cache


def test_a_corpus_is_tokenised_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(written(tmp_path, "a.txt", "abc"), cache=cache)
    monkeypatch.setattr(BytesTokenizer, "encode_pieces", None)
    again = opened(written(tmp_path, "elsewhere/b.txt", "abc"), cache=cache)
    assert again.path == first.path
    assert isinstance(again.tokens, np.memmap)
    assert documents_in(again) == documents_in(first)


def test_changed_content_is_tokenised_again_even_with_the_same_size_and_time(tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path, "a.txt", "abc")
    opened(file, cache=cache)
    times = file.stat()
    file.write_text("abd")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert documents_in(opened(file, cache=cache)) == [[*b"abd", EOD]]


def test_another_tokenizer_or_text_field_has_another_cache(
    tmp_path: Path, cache: Path, word_tokenizer: Callable[..., Path]
) -> None:
    file = written(tmp_path, "a.jsonl", '{"text": "the", "title": "cat"}')
    corpora = [
        opened(file, cache=cache),
        opened(file, cache=cache, text_field="title"),
        opened(file, cache=cache, tokenizer=word_tokenizer("</s>")),
        opened(file, cache=cache, tokenizer=word_tokenizer("<eos>")),
    ]
    assert len({corpus.path for corpus in corpora}) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:100],
        lambda raw: raw[:-8],
        lambda raw: raw + b"\0",
        lambda raw: b"x" + raw[1:],
        lambda raw: raw[:20] + b"}" + raw[21:],
        lambda raw: raw[:1024] + bytes([raw[1024] ^ 1]) + raw[1025:],
        lambda raw: raw[:-1] + b"\1",
        lambda raw: raw.replace(b'"tokens": 4', b'"tokens": 3'),
        lambda raw: raw.replace(b'"<u2"', b'"<u4"'),
        lambda raw: bytes(len(raw)),
    ],
)
def test_a_damaged_cache_is_noticed_aloud_and_written_anew(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes]
) -> None:
    file = written(tmp_path, "a.txt", "abc")
    path = opened(file, cache=cache).path
    assert path is not None
    intact = path.read_bytes()
    path.unlink()  # the first corpus still has it mapped
    path.write_bytes(damage(intact))
    assert path.read_bytes() != intact
    assert documents_in(opened(file, cache=cache)) == [[*b"abc", EOD]]
    assert f"token cache {path} is damaged" in capsys.readouterr().err
    assert path.read_bytes() == intact


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_cache(tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path, "a.txt", "abc")
    script = (
        "import os, sys; from dsv4c.train import tokens; from dsv4c.train.tokenizer import BytesTokenizer;"
        "tokens.os.fsync = lambda _: os.kill(os.getpid(), 9);"
        "tokens.open_corpus(sys.argv[1], tokenizer=BytesTokenizer(), cache_dir=sys.argv[2])"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, str(file), str(cache)], check=False, cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    assert [left.suffix for left in cache.iterdir()] == [".partial"]
    assert documents_in(opened(file, cache=cache)) == [[*b"abc", EOD]]


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path, "a.txt", "abc")
    path = opened(file, cache=cache).path
    assert path is not None
    path.unlink()
    old, fresh = (written(cache, f"{path.name}.{name}.partial", "x") for name in ("1.1", "2.2"))
    os.utime(old, (0, 0))
    opened(file, cache=cache)
    assert not old.exists()
    assert fresh.exists()


def test_a_failed_tokenising_leaves_no_file(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DataError):
        opened(written(tmp_path, "a.jsonl", '{"text": "a"}\nnonsense'), cache=cache)
    assert list(cache.iterdir()) == []


def test_a_file_that_changes_while_it_is_tokenised_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "a.txt", "abc")
    sources = find_sources(file)
    file.write_text("abd")
    monkeypatch.setattr(tokens_module, "find_sources", lambda *_: sources)
    with pytest.raises(DataError, match=r"changed while it was being tokenised\n  where:   .*a\.txt"):
        opened(file, cache=cache)


def test_ids_beyond_sixteen_bits_are_kept_in_thirty_two(tmp_path: Path, cache: Path) -> None:
    tokenizer = HubTokenizer(models.WordLevel({"the": 70_000, "</s>": 0}, unk_token="the"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = opened(
        written(tmp_path, "a.txt", "the"), cache=cache, tokenizer=tmp_path / "tokenizer.json", vocab_size=70_001
    )
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens.tolist() == [70_000, 0]


def test_a_slow_tokenising_shows_its_progress_and_a_quick_one_does_not(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(written(tmp_path, "a.txt", "abc"), cache=cache)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(tokens_module, "PROGRESS_AFTER_SECONDS", 0.0)
    opened(written(tmp_path, "a.txt", "abd"), cache=cache)
    assert "tokenising" in capsys.readouterr().err


# Tokenizers


def test_a_tokenizer_json_adds_cuts_and_pads_nothing(word_tokenizer: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(word_tokenizer("[CLS]", "[SEP]", bos=True, max_length=2))
    assert tokenizer.encode(b"the cat sat the").tolist() == [0, 1, 2, 0]
    assert tokenizer.encode(b"the").tolist() == [0]


def test_a_special_token_spelled_out_in_a_text_does_not_end_the_document(word_tokenizer: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(word_tokenizer("</s>"))
    assert tokenizer.eod not in tokenizer.encode(b"the </s> cat").tolist()


@pytest.mark.parametrize(
    "name", ["<|endoftext|>", "</s>", "<|end▁of▁sentence|>", "<\uff5cend▁of▁sentence\uff5c>", "[SEP]"]
)
def test_the_usual_end_of_document_tokens_are_found(word_tokenizer: Callable[..., Path], name: str) -> None:
    tokenizer = load_tokenizer(word_tokenizer("[CLS]", name))
    assert tokenizer.eod == tokenizer.vocab_size - 1


def test_a_special_token_goes_before_an_ordinary_word_that_looks_like_one(tmp_path: Path) -> None:
    tokenizer = HubTokenizer(models.WordLevel({"the": 0, "<|endoftext|>": 1}, unk_token="the"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).eod == tokenizer.token_to_id("</s>")


def test_a_given_end_of_document_token_is_taken(word_tokenizer: Callable[..., Path]) -> None:
    file = word_tokenizer("</s>", "<stop>")
    assert JsonTokenizer(file, eod="<stop>").eod == JsonTokenizer(file).eod + 1
    assert JsonTokenizer(file, eod="<stop>").fingerprint != JsonTokenizer(file).fingerprint


def test_vocab_size_counts_up_to_the_highest_id_when_ids_have_gaps(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    HubTokenizer(models.WordLevel({"the": 9, "</s>": 2}, unk_token="the")).save(str(file))
    assert load_tokenizer(file).vocab_size == 10


def test_words_and_documents_reach_the_batch_through_a_tokenizer_json(
    tmp_path: Path, cache: Path, word_tokenizer: Callable[..., Path]
) -> None:
    file = written(tmp_path, "a.txt", "the cat sat")
    loader = loader_from([file], cache, tokenizer=word_tokenizer("</s>"), seq_len=4, batch_size=1)
    assert loader.next_batch()["input_ids"].tolist() == [[0, 1, 2, 10]]


# Refused


def broken_link(folder: Path) -> Path:
    (folder / "a.txt").symlink_to(folder / "a.txt")
    return folder / "a.txt"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


REFUSED_FILES: dict[str, tuple[Callable[[Path], Path | str], str, str]] = {
    "missing path": (lambda f: f / "no.txt", "does not exist", "no.txt"),
    "empty path": (lambda f: "", "data path is empty", ""),
    "link in a circle": (broken_link, "cannot be read: Too many levels", "a.txt"),
    "link in a circle in a folder": (lambda f: broken_link(f).parent, "cannot be read: Too many levels", "a.txt"),
    "pipe": (pipe, "neither a file nor a folder", "a.txt"),
    "suffix": (lambda f: written(f, "a.bin", "x"), 'has the suffix ".bin"', "a.bin"),
    "json suffix": (lambda f: written(f, "a.json", "{}"), "rename it: .txt for text, .jsonl for one", "a.json"),
    "no suffix": (lambda f: written(f, "README", "x"), "file has no suffix", "README"),
    "empty folder": (lambda f: f, "no file that can be read as text (it is empty)", ""),
    "folder of other files": (lambda f: written(f, "a.bin", "x").parent, "(found only .bin)", ""),
    "folder with a pipe alone": (lambda f: pipe(f).parent, "no file that can be read as text", ""),
    "empty file": (lambda f: written(f, "a.txt", ""), "corpus holds no token", "a.txt"),
    "empty texts": (lambda f: written(f, "a.jsonl", '{"text": ""}\n'), "corpus holds no token", "a.jsonl"),
    "not json": (lambda f: written(f, "a.jsonl", '{"text": "a"}\n\n{"text": \n'), "line is not JSON", "a.jsonl:3"),
    "not an object": (lambda f: written(f, "a.jsonl", '["a"]'), "JSON array, not an object", "a.jsonl:1"),
    "no field": (lambda f: written(f, "a.jsonl", '{"a": 1, "b": 2}'), 'this line has: "a", "b"', "a.jsonl:1"),
    "not a string": (lambda f: written(f, "a.jsonl", '{"text": null}'), '"text" is a JSON null', "a.jsonl:1"),
    "line not utf-8": (lambda f: written(f, "a.jsonl", b'{"text": "\xff"}'), "line is not UTF-8", "a.jsonl:1"),
    "half a pair": (lambda f: written(f, "a.jsonl", '{"text": "\\ud800"}'), "surrogate pair", "a.jsonl:1"),
    "endless number": (lambda f: written(f, "a.jsonl", "1" * 9999), "cannot be read as JSON", "a.jsonl:1"),
    "deep brackets": (lambda f: written(f, "a.jsonl", "[" * 99999), "cannot be read as JSON", "a.jsonl:1"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_a_wrong_file_is_refused_with_its_place_and_what_to_do(tmp_path: Path, cache: Path, case: str) -> None:
    make, what, where = REFUSED_FILES[case]
    folder = tmp_path / "data"
    folder.mkdir()
    path = make(folder)
    with pytest.raises(DataError) as caught:
        loader_from([path], cache)
    error = caught.value
    assert what in str(error)
    assert error.where.endswith(where)
    assert error.allowed
    assert error.do


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"the\ncat\n\xff\xfe", 3, "invalid start byte"),
        (b"the\ncat \xc3", 2, "unexpected end"),
        (b"the\nc\0a\0t\0", 2, "NUL"),
    ],
)
def test_a_binary_file_is_refused_with_its_line_by_a_tokenizer_of_text(
    tmp_path: Path, cache: Path, word_tokenizer: Callable[..., Path], content: bytes, line: int, reason: str
) -> None:
    file = written(tmp_path, "a.txt", content)
    with pytest.raises(DataError, match=reason) as caught:
        opened(file, cache=cache, tokenizer=word_tokenizer("</s>"))
    assert caught.value.where == f"{file}:{line}"


def test_the_line_of_a_bad_byte_counts_the_pieces_before_it(
    tmp_path: Path, cache: Path, word_tokenizer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 8)
    file = written(tmp_path, "a.txt", b"the\n" * 10 + b"\xff")
    with pytest.raises(DataError) as caught:
        opened(file, cache=cache, tokenizer=word_tokenizer("</s>"))
    assert caught.value.where == f"{file}:11"


def test_a_text_that_the_tokenizer_cannot_encode_is_named(
    tmp_path: Path, cache: Path, word_tokenizer: Callable[..., Path]
) -> None:
    file = written(tmp_path, "a.jsonl", '{"text": "the"}\n{"text": "dog"}\n')
    with pytest.raises(DataError, match="cannot encode") as caught:
        opened(file, cache=cache, tokenizer=word_tokenizer("</s>", unknown=False))
    assert caught.value.where == f"{file}:2"


def test_a_tokenizer_without_end_of_document_token_is_refused(word_tokenizer: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"no end-of-document token\n(.|\n)*\[CLS\]"):
        load_tokenizer(word_tokenizer("[CLS]"))


def test_a_given_end_of_document_token_that_is_unknown_is_refused(word_tokenizer: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match='no token "<stop>"'):
        JsonTokenizer(word_tokenizer("</s>"), eod="<stop>")


def test_the_bytes_tokenizer_takes_no_other_end_of_document_token() -> None:
    with pytest.raises(DataError, match="leave eod out"):
        load_tokenizer("bytes", eod="</s>")


@pytest.mark.parametrize("content", [b"{}", b"the cat", b"\xff\xfe\0", b""])
def test_a_file_that_is_no_tokenizer_json_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        load_tokenizer(written(tmp_path, "tokenizer.json", content))


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'tokenizer cannot be read(.|\n)*allowed: "bytes"'):
        load_tokenizer(tmp_path / "no.json")


def test_a_tokenizer_larger_than_the_model_is_refused_before_anything_is_read(cache: Path) -> None:
    with pytest.raises(DataError, match=r"ids up to 256, the model knows 256(.|\n)*vocab_size to 257"):
        loader_from([Path("not looked at")], cache, vocab_size=256)


def test_a_cache_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", "abc")
    with pytest.raises(DataError, match="token cache cannot be written") as caught:
        open_corpus(file, tokenizer=BytesTokenizer(), cache_dir=file)
    assert caught.value.where == str(file)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"seq_len": 1}, "seq_len is 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2 of 2"),
        ({"rank": -1, "world_size": 2}, "rank is -1 of 2"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(changes: dict[str, int], what: str) -> None:
    with pytest.raises(DataError, match=what):
        loader_of(corpus_of(b"abc"), **changes)
