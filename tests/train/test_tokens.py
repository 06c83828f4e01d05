"""From files to documents and tokens: sources, cache, tokenizers."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import EOD, documents_in, loader_from, opened, written
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models

from dsv4c.errors import DataError
from dsv4c.train import documents as documents_module
from dsv4c.train import tokens as tokens_module
from dsv4c.train.sources import find_sources
from dsv4c.train.tokenizer import BytesTokenizer, JsonTokenizer, load_tokenizer

# Sources


def test_a_folder_is_read_recursively_in_sorted_order_without_hidden_and_foreign_files(tmp_path: Path, cache: Path) -> None:
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
    corpus = opened(written(tmp_path, "a.txt", "the"), cache=cache, tokenizer=tmp_path / "tokenizer.json", vocab_size=70_001)
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


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end▁of▁sentence|>", "<\uff5cend▁of▁sentence\uff5c>", "[SEP]"])
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
