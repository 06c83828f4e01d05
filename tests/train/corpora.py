"""Small corpora and loaders that the tests of the data share."""

from pathlib import Path

import numpy as np
import torch

from dsv4c.train.data import Loader, PackedDataset, make_loader
from dsv4c.train.tokenizer import BytesTokenizer
from dsv4c.train.tokens import TokenCorpus

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
