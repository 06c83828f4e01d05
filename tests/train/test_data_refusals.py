"""Data that cannot be used: what is refused, and what the message says."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import corpus_of, loader_from, loader_of, opened, written

from dsv4c.errors import DataError
from dsv4c.train import documents as documents_module
from dsv4c.train.tokenizer import BytesTokenizer, JsonTokenizer, load_tokenizer
from dsv4c.train.tokens import open_corpus

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
