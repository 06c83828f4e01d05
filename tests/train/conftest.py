"""Fixtures of the tests of the data."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HubTokenizer


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer.json of whole words; ``special`` are its special tokens."""

    def write(*special: str, unknown: bool = True, bos: bool = False, max_length: int | None = None) -> Path:
        words = ["the", "cat", "sat", "|", "<", ">", "endoftext", "s", "/"] + (["[UNK]"] if unknown else [])
        model = models.WordLevel({word: id for id, word in enumerate(words)}, **({"unk_token": "[UNK]"} if unknown else {}))
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
