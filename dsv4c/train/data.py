"""Batches of packed documents, in an order that a seed decides and a checkpoint continues.

Last stop in the way of the data: takes a ``TokenCorpus`` from ``tokens.py`` and gives the training loop ``input_ids``,
``targets`` and ``document_ids``.

The corpus is one endless stream: all documents in a permutation of (seed, epoch 0), then all in one of (seed, epoch 1),
and so on, each closed by the end-of-document id. Rows of ``seq_len`` tokens are cut from it one after another, so
nothing is padded and nothing is left out, and a place in the stream is the whole state of a loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4c.errors import DataError
from dsv4c.model.objectives import IGNORED
from dsv4c.train.tokenizer import Tokenizer, load_tokenizer
from dsv4c.train.tokens import TokenCorpus, open_corpus

Ids = npt.NDArray[np.int64]


class PackedDataset:
    """The stream of packed documents, readable at any position.

    A position counts tokens from the start of epoch 0; an epoch has those of the corpus, end-of-document ids included.
    """

    def __init__(self, corpus: TokenCorpus, *, seq_len: int, seed: int) -> None:
        if seq_len < 2:
            # Documents have two tokens at least, their end included, so two in a row always hold one that has a target.
            raise DataError(
                f"seq_len is {seq_len}", allowed="2 or more: a row of one token can have no target", do="raise seq_len"
            )
        if seed < 0:
            raise DataError(f"data seed is {seed}", allowed="0 or more", do="choose another seed")
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.lengths = np.diff(corpus.offsets)
        self._order: tuple[int, Ids, Ids] | None = None

    @property
    def epoch_tokens(self) -> int:
        return len(self.corpus.tokens)

    def order(self, epoch: int) -> tuple[Ids, Ids]:
        """Documents [N] of this epoch in their order, and the positions [N] within the epoch at which they start."""
        if self._order is None or self._order[0] != epoch:
            # Raw bits and a stable sort: numpy keeps those the same in every version, its own permutation() not.
            bits = np.random.PCG64(np.random.SeedSequence((self.seed, epoch))).random_raw(len(self.lengths))
            documents = np.argsort(bits, kind="stable")
            lengths = self.lengths[documents]
            self._order = epoch, documents, np.cumsum(lengths) - lengths
        return self._order[1:]

    def place(self, position: int) -> tuple[int, int, int]:
        """Position in the stream as (epoch, index in the epoch's order, offset in the document)."""
        epoch, within = divmod(position, self.epoch_tokens)
        _, starts = self.order(epoch)
        index = int(np.searchsorted(starts, within, side="right")) - 1
        return epoch, index, within - int(starts[index])

    def row(self, position: int) -> tuple[Ids, Ids, Ids]:
        """``input_ids``, ``targets`` and ``document_ids`` [S] int64 of the row that starts at this position.

        ``targets[t]`` is the token after ``input_ids[t]`` in its document, read past the end of the row if need be, and
        -100 where the document ends. ``document_ids`` count the documents of the row from 0; one that began in an
        earlier row is a document like any other.
        """
        inputs, targets, ids = (np.empty(self.seq_len, np.int64) for _ in range(3))
        tokens, offsets = self.corpus.tokens, self.corpus.offsets
        epoch, index, offset = self.place(position)
        filled = document = 0
        while filled < self.seq_len:
            order, _ = self.order(epoch)
            begin, end = int(offsets[order[index]]) + offset, int(offsets[order[index] + 1])
            stop = min(end, begin + self.seq_len - filled)
            upto = filled + stop - begin
            inputs[filled:upto] = tokens[begin:stop]
            targets[filled : upto - 1] = tokens[begin + 1 : stop]
            targets[upto - 1] = tokens[stop] if stop < end else IGNORED
            ids[filled:upto] = document
            filled, document, index, offset = upto, document + 1, index + 1, 0
            if index == len(order):
                epoch, index = epoch + 1, 0
        return inputs, targets, ids


class Loader:
    """Endless batches of rows; iterate over it, or call ``next_batch``.

    All ranks walk one stream together: of the ``world_size * batch_size`` rows of a step, rank r takes rows r,
    r + world_size, and so on. The state is the same on every rank, and says nothing of batch size or world size, so a
    run may continue with others: it goes on at the first token not seen yet.
    """

    def __init__(self, dataset: PackedDataset, *, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}", allowed="1 or more", do="raise batch_size")
        if not 0 <= rank < world_size:
            raise DataError(
                f"rank is {rank} of {world_size} processes", allowed="0 to world_size - 1", do="correct the launcher"
            )
        self.dataset, self.batch_size, self.rank, self.world_size = dataset, batch_size, rank, world_size
        self._position = 0

    @property
    def tokens_seen(self) -> int:
        """Tokens that all ranks together have drawn since the start of the run."""
        return self._position

    @property
    def epoch(self) -> float:
        """Epochs drawn since the start of the run: 1.5 is the middle of the second."""
        return self._position / self.dataset.epoch_tokens

    def next_batch(self) -> dict[str, Tensor]:
        """``input_ids``, ``targets`` (already shifted, -100 is ignored), ``document_ids``: [B, S] int64, on the CPU."""
        seq_len = self.dataset.seq_len
        starts = (self._position + (i * self.world_size + self.rank) * seq_len for i in range(self.batch_size))
        columns = zip(*(self.dataset.row(start) for start in starts), strict=True)
        batch = {
            name: torch.from_numpy(np.stack(rows))
            for name, rows in zip(("input_ids", "targets", "document_ids"), columns, strict=True)
        }
        self._position += self.batch_size * self.world_size * seq_len
        return batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self.next_batch()

    def state_dict(self) -> dict[str, int | str]:
        """Place of the next token (``epoch``, ``index`` in its order, ``offset`` in the document), and its corpus."""
        epoch, index, offset = self.dataset.place(self._position)
        return {**self._identity(), "epoch": epoch, "index": index, "offset": offset}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continues exactly where ``state_dict`` was taken. Raises DataError for a state of another corpus or order."""
        here = self._identity()
        if missing := [name for name in (*here, "epoch", "index", "offset") if name not in state]:
            raise DataError(
                f"saved data position lacks {', '.join(missing)}",
                allowed="what Loader.state_dict() returned",
                do="resume from another checkpoint",
            )
        differing = [name for name in here if state[name] != here[name]]
        if differing:
            raise DataError(
                "saved data position belongs to another " + ", ".join(_MEANING[name] for name in differing),
                where="; ".join(f"{name}: saved {_short(state[name])}, now {_short(here[name])}" for name in differing),
                allowed="the corpus, tokenizer, seq_len and seed that the position was saved with",
                do="resume with those, or start a new run",
            )
        epoch, index, offset = (int(state[name]) for name in ("epoch", "index", "offset"))
        documents, starts = self.dataset.order(max(epoch, 0))
        if epoch < 0 or not 0 <= index < len(documents) or not 0 <= offset < self.dataset.lengths[documents[index]]:
            raise DataError(
                f"saved data position is outside the corpus: epoch {epoch}, index {index}, offset {offset}",
                allowed=f"epoch 0 or more, index below {len(documents)}, offset below the document's length",
                do="resume from another checkpoint",
            )
        self._position = epoch * self.dataset.epoch_tokens + int(starts[index]) + offset

    def _identity(self) -> dict[str, int | str]:
        corpus = self.dataset.corpus
        return {
            "corpus": corpus.fingerprint,
            "tokenizer": corpus.tokenizer.fingerprint,
            "seq_len": self.dataset.seq_len,
            "seed": self.dataset.seed,
        }


_MEANING = {"corpus": "corpus (or other content of it)", "tokenizer": "tokenizer", "seq_len": "seq_len", "seed": "seed"}


def _short(value: int | str) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def make_loader(
    paths: str | Path | Sequence[str | Path] | None,
    *,
    tokenizer: str | Path | Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int,
    cache_dir: str | Path | None,
    vocab_size: int,
    text_field: str = "text",
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Loader over text files, ``.jsonl`` files and folders of them, or the sources of Python's standard library (None).

    ``tokenizer``: what ``load_tokenizer`` takes, or what it returned. ``vocab_size``: how many ids the model knows.
    ``cache_dir`` None is the user's cache folder. Raises DataError for whatever cannot be used, with its file and line.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer gives ids up to {tokenizer.vocab_size - 1}, the model knows {vocab_size}",
            where=f"tokenizer {tokenizer.name}",
            allowed=f"a tokenizer of at most {vocab_size} ids, or a model of at least {tokenizer.vocab_size}",
            do=f"set the model's vocab_size to {tokenizer.vocab_size} or more",
        )
    corpus = open_corpus(paths, tokenizer=tokenizer, cache_dir=cache_dir, text_field=text_field)
    dataset = PackedDataset(corpus, seq_len=seq_len, seed=seed)
    return Loader(dataset, batch_size=batch_size, rank=rank, world_size=world_size)
