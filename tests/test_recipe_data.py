"""From files to batches: nothing of the text is lost, and every batch can be made again."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hytrain.errors import ConfigError
from hytrain.recipe import config, text, tokenizer
from hytrain.recipe.batches import Batches, RandomBatches, Windows, spread

PROSE = 'Der Bär aß süße Äpfel, 3 Stück.\n  He said: "Naïve café" \N{SNOWMAN}\n\nEnd.\n' * 40


def test_files_folders_and_compression_are_one_text(tmp_path: Path) -> None:
    folder = tmp_path / "folder" / "deeper"
    folder.mkdir(parents=True)
    (tmp_path / "folder" / "b.txt").write_text("two\n")
    (folder / "c.md").write_text("three")
    (folder / "ignored.bin").write_bytes(b"\x00")
    (folder / "ignored.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "folder" / "a.txt.xz").write_bytes(lzma.compress(b"one\n"))
    (tmp_path / "last.gz").write_bytes(gzip.compress(b"four"))
    assert text.read([tmp_path / "folder", tmp_path / "last.gz"]) == b"one\n\ntwo\n\nthree\n\nfour"


def test_unusable_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "torn.xz").write_bytes(lzma.compress(b"word " * 1000)[:-20])
    (tmp_path / "torn.gz").write_bytes(gzip.compress(b"word " * 1000)[:-20])
    (tmp_path / "wrong.gz").write_bytes(b"plain")
    packed = gzip.compress(b"word " * 1000)
    (tmp_path / "damaged.gz").write_bytes(packed[:12] + bytes([packed[12] ^ 0xFF]) + packed[13:])
    (tmp_path / "bare").mkdir()
    for name in ("chat.jsonl", "chat.jsonl.xz", "d.parquet", "picture.png", "a.tar.gz"):
        (tmp_path / name).write_bytes(b'{"messages": []}')
    for name, part in (
        ("empty.txt", "no text in"),
        *((name, "can't be read") for name in ("torn.xz", "torn.gz", "wrong.gz", "damaged.gz")),
        ("bare", "holds no text file"),
        ("missing.txt", "does not exist"),
        *((name, "data.kind: chat") for name in ("chat.jsonl", "chat.jsonl.xz", "d.parquet")),
        *((name, "does not end in") for name in ("picture.png", "a.tar.gz")),
    ):
        with pytest.raises(ConfigError, match=part) as caught:
            text.read([tmp_path / name])
        assert "\n" not in str(caught.value)
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "tokenizer.json").write_text("{}")
    for name, part in (
        ("missing", "does not exist"),
        ("bare", "holds no tokenizer"),
        ("hollow", "holds no usable tokenizer"),
    ):
        with pytest.raises(ConfigError, match=part) as caught:
            tokenizer.load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_split_prefers_the_end_of_a_document_and_keeps_characters_whole() -> None:
    documents = [letter * 30 for letter in (b"a", b"b", b"c", b"d")]
    seen, unseen = text.split(b"\n\n".join(documents), validation=0.4)
    assert seen == b"\n\n".join(documents[:3]) and unseen == documents[3]
    whole = ("\N{SNOWMAN}" * 101).encode()
    for validation in (0.1, 0.33, 0.5, 0.77):
        seen, unseen = text.split(whole, validation)
        assert seen + unseen == whole
        assert len(unseen.decode()) == pytest.approx(101 * validation, abs=1)


def test_bytes_are_their_own_tokens(tmp_path: Path) -> None:
    words = tokenizer.build(config.Tokenizer(), None, b"")
    everything = bytes(range(256))
    assert words.vocab_size == 256 and words.encode(everything).tolist() == list(everything)
    assert words.decode(words.encode(PROSE.encode())) == PROSE
    words.hf.save_pretrained(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    assert hf(PROSE)["input_ids"] == list(PROSE.encode()) and hf.decode(list(PROSE.encode())) == PROSE
    assert tokenizer.load(tmp_path).encode(everything).dtype == torch.uint8


def test_bpe_is_trained_lossless_and_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "CHUNK_BYTES", 100)
    wanted = config.Tokenizer(kind="bpe", vocab_size=300)
    words, again = (tokenizer.build(wanted, None, PROSE.encode()) for _ in range(2))
    tokens = words.encode(PROSE.encode())
    assert words.vocab_size == 300 and len(tokens) < len(PROSE.encode()) * 0.7
    assert words.decode(tokens) == PROSE
    assert torch.equal(tokens, again.encode(PROSE.encode()))
    words.hf.save_pretrained(tmp_path)
    assert torch.equal(tokenizer.load(tmp_path).encode(PROSE.encode()), tokens)
    assert AutoTokenizer.from_pretrained(tmp_path).decode(tokens.tolist()) == PROSE


def test_a_model_s_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    """Another tokenizer would give the model's tokens another meaning."""
    bpe = tokenizer.build(config.Tokenizer(kind="bpe", vocab_size=300), None, PROSE.encode())
    bpe.hf.save_pretrained(tmp_path / "bpe")
    tokenizer.build(config.Tokenizer(), None, b"").hf.save_pretrained(tmp_path / "bytes")
    expected = bpe.encode(PROSE.encode())
    assert torch.equal(tokenizer.build(config.Tokenizer(), tmp_path / "bpe", b"").encode(PROSE.encode()), expected)
    for stated in (config.Tokenizer(), config.Tokenizer(kind="bytes")):
        assert tokenizer.build(stated, tmp_path / "bytes", b"").is_bytes
    for stated, folder in (("bytes", "bpe"), ("bpe", "bpe"), ("bpe", "bytes")):
        with pytest.raises(ConfigError, match=f"tokenizer.kind: {stated} would give its tokens another meaning"):
            tokenizer.build(config.Tokenizer.model_validate({"kind": stated}), tmp_path / folder, PROSE.encode())
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"holds no tokenizer; name the folder of one as tokenizer\.path"):
        tokenizer.build(config.Tokenizer(), tmp_path / "none", b"")


def test_batch_depends_on_seed_and_step_alone() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    source, windows = (Batches(Windows(tokens, 16), 3, 4, in_epochs=False) for _ in range(2))
    batch = source.at(7).tokens
    source.at(8)
    assert torch.equal(batch, source.at(7).tokens)
    assert torch.equal(batch, windows.at(7).tokens)
    assert not torch.equal(batch, source.at(8).tokens)
    assert not torch.equal(batch, Batches(Windows(tokens, 16), 4, 4, in_epochs=False).at(7).tokens)
    assert batch.dtype == torch.int64 and torch.equal(batch - batch[:, :1], torch.arange(16).expand(4, 16))
    every = Batches(Windows(tokens[:6], 4), seed=0, batch_size=64, in_epochs=False).at(0).tokens
    assert set(every[:, 0].tolist()) == {0, 1, 2}, "each window can be drawn"
    random = RandomBatches(vocab_size=5, seed=1, batch_size=8, sequence_length=32)
    first, second = random.at(3).tokens, random.at(4).tokens
    assert random.at(0).tokens.unique().tolist() == [0, 1, 2, 3, 4] and first.shape == (8, 32)
    assert torch.equal(random.at(3).tokens, first) and not torch.equal(first, second)


def test_validation_windows_are_fixed_and_spread() -> None:
    tokens = torch.arange(100)
    starts = [batch.tokens[:, 0].tolist() for batch in spread(Windows(tokens, 10), 2, 3)]
    assert starts == [[0, 18, 36], [54, 72, 90]]
    short = [batch.tokens[:, 0].tolist() for batch in spread(Windows(tokens[:25], 10), 2, 3)]
    assert short == [[0, 15]]
    with pytest.raises(ConfigError, match="less than one window of 16"):
        Windows(tokens[:15], 16)
    with pytest.raises(ConfigError, match="validation text"):
        Windows(tokens[:15], 16, "validation")
