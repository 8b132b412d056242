"""Texts for language models: where the files lie, what they must hold, and how they are read.

A file is looked for in `DIR/NAME` and in `DIR`, where NAME is the folder of its data set and DIR is
`--data-dir` or else the environment variable `PATHSPACE_DATA`; it may be packed, with `.gz` or
`.zip` after its name. Its SHA-256 must be the known one, so that a number in a report always means
the same text. A byte of a deflated file can stand for 1,032 bytes, so that a file of one megabyte
can fill a gigabyte: packed files are read up to the size that a data set can have.

Sources: Penn Treebank: M. Marcus, B. Santorini and M. Marcinkiewicz (1993), as prepared by T.
    Mikolov (2010). WikiText-2: S. Merity, C. Xiong, J. Bradbury and R. Socher (2016). text8,
    enwik8: M. Mahoney, 10^8 bytes of the English Wikipedia of 3 March 2006, cleaned and as they
    are.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pathspace.experiments.errors import ConfigurationError
from pathspace.extras import install

MOST = 1 << 28  # bytes; the largest data set that the tasks know, CIFAR-10 or -100, has 154 million
_BLOCK = 1 << 17

# What the standard library raises at files that are cut off, damaged or packed in ways it does not
# know.
UNREADABLE = (
    OSError,
    EOFError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
)


class OversizeError(OSError):
    """A file is larger, unpacked, than any data set it could be."""


def gunzip(content: bytes, most: int = MOST) -> bytes:
    """Return what a gzip file holds.

    Raises:
        OversizeError: It is more than `most` bytes.
        EOFError, OSError, zlib.error: It is no gzip file, cut off or damaged.
    """
    unpacked = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while block := file.read(_BLOCK):
            unpacked += block
            if len(unpacked) > most:
                raise OversizeError(f"it is larger than {most} bytes unpacked")
    return bytes(unpacked)


def check_zip(path: Path, most: int = MOST) -> None:
    """Raise an `OversizeError` if the files in a zip archive claim more bytes than `most`; they cannot have more.

    Raises:
        OSError, zipfile.BadZipFile: It cannot be read or is no such archive.
    """
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > most:
            raise OversizeError(f"it is larger than {most} bytes unpacked")


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Corpus:
    """A text in three parts.

    Attributes:
        title: What reports call it.
        folder: Its folder below the data folder.
        files: The file names of training, validation and test part, or one file that holds all of
            them.
        digests: The SHA-256 of each file, unpacked.
        missing: What to do when there is no such file.
        cuts: Where one file is cut, in bytes: the ends of the parts.
        encoding: What the bytes mean; "latin-1" makes every byte a symbol.
        download: (dataset, configuration, column, revision) of the word files at Hugging Face, or
            empty.
    """

    title: str
    folder: str
    files: tuple[str, ...]
    digests: tuple[str, ...]
    missing: str
    cuts: tuple[int, ...] = ()
    encoding: str = "utf-8"
    download: tuple[str, ...] = field(default=())


PTB_MISSING = (
    "T. Mikolov's simple-examples.tgz holds the word files in its folder `data`; a character file spells "
    "those with `_` for a space and a space after every symbol"
)

CHARACTERS = {
    "ptb": Corpus(
        "Penn Treebank, characters",
        "ptb",
        ("ptb.char.train.txt.gz", "ptb.char.valid.txt.gz", "ptb.char.test.txt.gz"),
        (
            "e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9",
            "21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8",
            "1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe",
        ),
        PTB_MISSING,
    ),
    # The usual split; so is that of enwik8.
    "text8": Corpus(
        "text8",
        "text8",
        ("text8",),
        ("6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",),
        "http://mattmahoney.net/dc/text8.zip is the file, packed, and is read as it is",
        cuts=(90_000_000, 95_000_000, 100_000_000),
    ),
    "enwik8": Corpus(
        "enwik8, bytes",
        "enwik8",
        ("enwik8",),
        ("2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",),
        "http://mattmahoney.net/dc/enwik8.zip is the file, packed, and is read as it is",
        cuts=(90_000_000, 95_000_000, 100_000_000),
        encoding="latin-1",  # a cut may go through a character
    ),
    # Cut as the whole file is: nine tenths, a twentieth and a twentieth.
    "text8-prefix": Corpus(
        "the first 6.8 million characters of text8",
        "text8",
        ("text8_first6800000.txt.gz",),
        ("88fe6c55543eb636352d9f6482efa3c35433743fceb51f460f0337da4310d940",),
        "it is gzip -c of the first 6,800,000 bytes of text8 (http://mattmahoney.net/dc/text8.zip)",
        cuts=(6_120_000, 6_460_000, 6_800_000),
    ),
}

WORDS = {
    "ptb": Corpus(
        "Penn Treebank, words",
        "ptb",
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        (
            "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        ),
        PTB_MISSING,
        download=(
            "ptb-text-only/ptb_text_only",
            "penn_treebank",
            "sentence",
            "refs/convert/parquet",
        ),
    ),
    "wikitext-2": Corpus(
        "WikiText-2",
        "wikitext-2",
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        (
            "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        ),
        "wikitext-2-v1.zip of Merity et al. (2016) holds them",
        download=("Salesforce/wikitext", "wikitext-2-v1", "text", "main"),
    ),
}


def read_corpus(corpus: Corpus, data_dir: Path | None) -> tuple[str, str, str]:
    """Read the training, the validation and the test part of a text."""
    folder = data_folder(data_dir)
    if folder is None and corpus.download:
        contents = _download(corpus)
    else:
        contents = [_read(corpus, name, folder) for name in corpus.files]
    for name, content, digest in zip(corpus.files, contents, corpus.digests, strict=True):
        if hashlib.sha256(content).hexdigest() != digest:
            raise ConfigurationError(
                f"{name!r} is not the file that published results are about (its SHA-256 differs): "
                f"{corpus.missing}."
            )
    if corpus.cuts:
        contents = [contents[0][start:end] for start, end in pairwise((0, *corpus.cuts))]
    train, validation, test = (content.decode(corpus.encoding) for content in contents)
    return train, validation, test


def data_folder(data_dir: Path | None) -> Path | None:
    """Return the folder with the data sets: the given one, that of `PATHSPACE_DATA`, or None."""
    named = os.environ.get("PATHSPACE_DATA")
    folder = data_dir or (Path(named) if named else None)
    if folder is not None and not folder.is_dir():
        where = "--data-dir" if data_dir else "PATHSPACE_DATA"
        raise ConfigurationError(
            f"There is no folder {str(folder)!r}, which {where} names: give the one with the data sets."
        )
    return folder


def _read(corpus: Corpus, name: str, folder: Path | None) -> bytes:
    path = None if folder is None else _find(name, (folder / corpus.folder, folder))
    if path is None:
        looked = (
            "no data folder was given" if folder is None else f"{str(folder)!r} holds no {name}"
        )
        raise _no_data(corpus, looked)
    try:
        if path.suffix == ".zip":
            check_zip(path)
            with zipfile.ZipFile(path) as archive:
                return archive.read(name)
        content = path.read_bytes()
        return gunzip(content) if path.suffix == ".gz" else content
    except (*UNREADABLE, KeyError) as error:
        raise ConfigurationError(
            f"Cannot read {str(path)!r} ({error}): download the file again."
        ) from error


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    places = (folder / f"{name}{packed}" for folder in folders for packed in ("", ".gz", ".zip"))
    return next((place for place in places if place.is_file()), None)


def _download(corpus: Corpus) -> list[bytes]:
    dataset, configuration, column, revision = corpus.download
    no_data = functools.partial(_no_data, corpus)
    parts = [
        hugging_face(no_data, dataset, configuration, split=part, revision=revision)[column]
        for part in PARTS
    ]
    return [_as_file(lines) for lines in parts]


def hugging_face(no_data: Callable[[str], ConfigurationError], *names: str, **options: str) -> Any:
    """Return what `datasets.load_dataset` loads."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports] -- an extra
    except ImportError as error:
        reason = "neither is the package 'datasets' installed nor a data folder given"
        raise no_data(reason) from error
    try:
        return load_dataset(*names, **options)
    except Exception as error:  # the package passes on what its many transports raise
        failure = f"{type(error).__name__}: {first_line(error)}"
        raise no_data(f"the download failed ({failure})") from error


def _as_file(lines: Sequence[str]) -> bytes:
    # One dataset strips its lines and the other does not; in the files spaces surround the words of
    # a line.
    return "".join(f" {line.strip()} \n" if line.strip() else " \n" for line in lines).encode()


def _no_data(corpus: Corpus, reason: str) -> ConfigurationError:
    download = f"; or install what the download needs: {install('download')}"
    return ConfigurationError(
        f"{corpus.title}: {reason}. Put {', '.join(corpus.files)} into a folder {corpus.folder!r} and give "
        f"its parent by --data-dir or PATHSPACE_DATA ({corpus.missing})"
        f"{download if corpus.download else ''}."
    )
