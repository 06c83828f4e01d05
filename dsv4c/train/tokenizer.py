"""Tokenizers: raw bytes, and any Hugging Face ``tokenizer.json``.

In the way of the data between ``documents.py``, which reads pieces of documents, and ``tokens.py``, which stores ids.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsv4c.errors import DataError
from dsv4c.train.documents import Piece
from dsv4c.train.sources import LINES_SUFFIX

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's own, with full-width bars
    "<|end\u2581of\u2581sentence|>",
    "<|end_of_sentence|>",
    "<|eos|>",
    "<eos>",
    "[EOS]",
    "</s>",
    "[SEP]",
)


class Tokenizer(ABC):
    """Bytes to token ids in [0, ``vocab_size``). ``fingerprint`` is a hash of everything that decides the ids."""

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[Piece]) -> list[TokenArray]:
        """Ids of each piece, without the end-of-document id. Raises DataError with file and line of a bad one."""

    def encode(self, text: bytes) -> TokenArray:
        """Ids [T] (uint16 or uint32) of one text, without the end-of-document id."""
        return self.encode_pieces([Piece(text, Path("text"), 1, True, len(text))])[0]


class BytesTokenizer(Tokenizer):
    """Every byte is its own id; 256 ends a document. Accepts any file."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    fingerprint = hashlib.blake2b(b"bytes, end of document 256", digest_size=32).hexdigest()

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[TokenArray]:
        return [np.frombuffer(piece.data, dtype=np.uint8).astype(np.uint16) for piece in pieces]


class JsonTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``. ``eod`` names the token that ends a document, if it is none of the usual ones.

    Nothing is added to a text and nothing cut from it, whatever post-processing, truncation and padding the file sets;
    a special token spelled out in a text is encoded as the plain characters it is there.
    """

    def __init__(self, path: str | Path, eod: str | None = None) -> None:
        import tokenizers  # here, because training on bytes needs none of it

        path = Path(path).expanduser()
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"tokenizer cannot be read: {error.strerror}",
                where=str(path),
                allowed='"bytes", or the path of a tokenizer.json',
                do="correct the path",
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise DataError(
                f"not a tokenizer.json: {error}",
                where=str(path),
                allowed="the file that tokenizers' Tokenizer.save writes",
                do='name such a file, or use "bytes"; data files go into the data paths',
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.vocab_size = max(vocab.values(), default=-1) + 1  # ids may have gaps, so their number would be too small
        self.eod = self._find_eod(vocab, eod, str(path))
        self.fingerprint = hashlib.blake2b(content + f"\neod {self.eod}".encode(), digest_size=32).hexdigest()

    def _find_eod(self, vocab: dict[str, int], given: str | None, where: str) -> int:
        special = {
            token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        # Special tokens first: "</s>" can also be an ordinary entry of a vocabulary that was learned on HTML.
        for names in (special, vocab):
            for name in END_OF_DOCUMENT_NAMES if given is None else (given,):
                if name in names:
                    return names[name]
        what = "tokenizer has no end-of-document token" if given is None else f'tokenizer has no token "{given}"'
        usual = "one of " + " ".join(END_OF_DOCUMENT_NAMES)
        raise DataError(
            what,
            where=where,
            allowed=f"{usual}, or any token given by name; special tokens here: {', '.join(special) or 'none'}",
            do='give the name of the token that ends a document (eod="..."), or add one to the tokenizer',
        )

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[TokenArray]:
        texts = [self._decode(piece) for piece in pieces]
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # bare Exception again; a batch does not tell which of its texts it was
            if len(pieces) > 1:
                return [self.encode_pieces([piece])[0] for piece in pieces]
            raise DataError(
                f"tokenizer cannot encode the text: {error}",
                where=f"{pieces[0].path}:{pieces[0].line}",
                allowed="a tokenizer that has an id for every text",
                do="use one with an unknown token or a byte fallback, or remove the text",
            ) from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _decode(self, piece: Piece) -> str:
        try:
            text = piece.data.decode()
            nul = piece.data.find(b"\0")
            # In a JSON line a NUL was written on purpose, as an escape; elsewhere it means that this is no text file.
            if nul < 0 or piece.path.suffix.lower() == LINES_SUFFIX:
                return text
            reason, at = "it holds a NUL byte", nul
        except UnicodeDecodeError as error:
            reason, at = error.reason, error.start
        line = piece.line + piece.data.count(b"\n", 0, at)
        raise DataError(
            f"file is not UTF-8 text: {reason}",
            where=f"{piece.path}:{line}",
            allowed="UTF-8 text for this tokenizer, any bytes for the bytes tokenizer",
            do='re-encode the file as UTF-8, leave it out, or use the tokenizer "bytes"',
        )


def load_tokenizer(spec: str | Path, eod: str | None = None) -> Tokenizer:
    """``"bytes"``, or the path of a ``tokenizer.json`` or of the folder that holds one. Raises DataError."""
    if str(spec) != "bytes":
        return JsonTokenizer(spec, eod)
    if eod is not None:
        raise DataError(
            f'the bytes tokenizer has no token "{eod}"', allowed="its own end of document, 256", do="leave eod out"
        )
    return BytesTokenizer()
