"""The training data: documents become one long stream of tokens, and the stream is cut into sequences.

Documents are joined by an end-of-text token and packed, so every sequence is full. Which sequences a training
step sees is a pure function of (seed, step): nothing has to be remembered to resume.
"""

import os
import random
import sys
from array import array
from functools import lru_cache
from itertools import chain

import torch

FILE_TYPES = {  # how datasets.load_dataset reads them
    ".txt": {"path": "text", "sample_by": "document"}, ".json": {"path": "json"},
    ".jsonl": {"path": "json"}, ".parquet": {"path": "parquet"},
}


def stories(count=2000):
    """Yields little stories in the manner of TinyStories (Eldan and Li, arXiv 2305.07759), always the same.

    Easier than real text: good for seeing a loss fall within a minute, not for comparing models.
    """
    draw = random.Random(0).random  # the one source of chance: its numbers don't depend on Python's version
    names = "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Kira Leo Mia Noah Olga Paul".split()
    animals = "cat dog bird frog horse rabbit fox duck mouse turtle".split()
    things = "ball kite boat hat drum cake lamp book shell key".split()
    places = "garden park forest kitchen river hill beach barn school market".split()
    moods = "happy sad tired brave curious hungry quiet proud".split()
    colours = "red blue green yellow small big old shiny".split()
    patterns = [
        "{name} went to the {place} with a {colour} {thing}.", "A {mood} {animal} sat near the {place}.",
        '"Is this your {thing}?" asked the {animal}.', '"Yes, it is my {colour} {thing}," said {name}.',
        "{name} looked for the {thing} in the {place}.", "The {animal} was {mood} and ran to {friend}.",
        "{friend} found the {thing} under the {animal}.", "Then {name} and {friend} played with the {thing}.",
        "{name} gave the {thing} to the {animal}.", '"Thank you," said {friend}, and they were {mood}.',
        "It began to rain, so they hid in the {place}.", "The {colour} {thing} fell into the {place}.",
    ]

    def pick(choices):
        return choices[int(draw() * len(choices))]

    for _ in range(count):
        words = {"name": pick(names), "friend": pick(names), "animal": pick(animals), "thing": pick(things),
                 "place": pick(places), "mood": pick(moods), "colour": pick(colours)}
        sentences = [f"Once upon a time there was a {words['mood']} child called {words['name']}."]
        sentences += [pick(patterns).format(**words) for _ in range(4 + int(draw() * 4))]
        yield " ".join([*sentences, "They all went home and slept."])


def load_tokenizer(name):
    """Returns (encode, vocab_size). encode turns texts into lists of tokens, each ended by end-of-text.

    "bytes" needs no files: a token is a byte of UTF-8, and byte 0, which no text contains, is end-of-text.
    """
    if name == "bytes":
        return lambda texts: [list(text.encode()) + [0] for text in texts], 256
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise OSError(f"tokenizer {name} is no folder here and can't be had from the hub; without network "
                      f"use a folder or --tokenizer_name bytes ({type(error).__name__})")
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"tokenizer {name} has no eos_token to end a text with")

    def encode(texts):
        return [ids + [end] for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]

    return encode, len(tokenizer)


def load_tokens(dataset_name, encode):
    """Returns all tokens, int32. dataset_name: stories, a .txt, .jsonl or .parquet file or a hub name.

    Files and hub data are tokenised once and kept in the cache of the library `datasets`; of processes that
    start together one works, the others wait. A .txt file is one document, else each row's "text" is one.
    """
    if dataset_name == "stories":
        tokens = array("i", chain.from_iterable(encode(list(stories()))))
        return torch.frombuffer(tokens, dtype=torch.int32)

    source, suffix = {"path": dataset_name}, os.path.splitext(dataset_name)[1]
    if suffix in FILE_TYPES:
        source = {**FILE_TYPES[suffix], "data_files": dataset_name}
        if not os.path.isfile(dataset_name):
            raise FileNotFoundError(f"there is no file {dataset_name}")
    import datasets
    from filelock import FileLock
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # in a log they are noise
    os.makedirs(datasets.config.HF_DATASETS_CACHE, exist_ok=True)
    with FileLock(os.path.join(datasets.config.HF_DATASETS_CACHE, "tokenize.lock")):
        try:
            documents = datasets.load_dataset(**source, split="train")
        except Exception as error:  # each format and the hub have exceptions of their own
            raise ValueError(f"{dataset_name} can't be loaded; without network use a .txt, .jsonl or "
                             f".parquet file or stories ({type(error).__name__} {error.__cause__ or error})")
        if getattr(documents.features.get("text"), "dtype", None) not in ("string", "large_string"):
            raise ValueError(f"{dataset_name} has no column text of strings: it has {documents.features}")
        tokenized = documents.map(
            lambda rows: {"tokens": encode([text or "" for text in rows["text"]])}, batched=True,
            remove_columns=documents.column_names, desc="tokenise",
            features=datasets.Features({"tokens": datasets.List(datasets.Value("int32"))}))
        return flat_file(tokenized)


def flat_file(tokenized):
    """Returns column "tokens" as one int32 tensor, mapped from a file beside the data set's cache.

    Nothing is read before it is used, and processes share one copy.
    """
    path = os.path.splitext(tokenized.cache_files[0]["filename"])[0] + ".tokens"
    if not os.path.exists(path):
        with open(path + ".partial", "wb") as file:
            for chunk in tokenized.data.column("tokens").chunks:
                file.write(chunk.flatten().to_numpy())
        os.replace(path + ".partial", path)
    return torch.from_file(path, size=os.path.getsize(path) // 4, dtype=torch.int32)


class Sequences:
    """An endless row of training sequences. Each epoch is a fresh permutation of all sequences there are."""

    def __init__(self, tokens, seq_len, seed):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.num_sequences = (len(tokens) - 1) // seq_len  # the last target comes one after the last input
        if self.num_sequences == 0:
            shorter = f" or --seq_len {len(tokens) - 1}" if len(tokens) > 1 else ""
            raise ValueError(f"the text has {len(tokens)} tokens, too few for one sequence of {seq_len} and "
                             f"its last target: use more text{shorter}")

    @lru_cache(maxsize=2)
    def order(self, epoch):
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed} epoch {epoch}").getrandbits(63))
        return torch.randperm(self.num_sequences, generator=generator).tolist()

    def batch(self, first, count, device):
        """Returns inputs and targets, both (count, seq_len) int64, of sequences first, first + 1, ..."""
        numbers = [divmod(i, self.num_sequences) for i in range(first, first + count)]
        starts = [self.order(epoch)[place] * self.seq_len for epoch, place in numbers]
        rows = torch.stack([self.tokens[start : start + self.seq_len + 1] for start in starts])
        rows = rows.to(device, torch.int64)
        return rows[:, :-1], rows[:, 1:]
