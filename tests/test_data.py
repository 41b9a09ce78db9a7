"""The data: which sequences a training step sees, and corpora from files, tokenised once."""

import hashlib
import json
import shutil
import sys
from pydoc_data.topics import topics

import pytest
import torch

import launch


def numbered(modules, num_tokens, seq_len, seed=0):
    """Sequences of the tokens 0, 1, 2, ..., so that a token says where it stood."""
    return modules.data.Sequences(torch.arange(num_tokens, dtype=torch.int32), seq_len, seed)


def starts(sequences, first, count):
    return sequences.batch(first, count, "cpu")[0][:, 0].tolist()


def test_targets_are_the_inputs_shifted_by_one(modules):
    inputs, targets = numbered(modules, 101, 10).batch(0, 10, "cpu")
    assert inputs.shape == targets.shape == (10, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("num_tokens, num_sequences", [(11, 1), (100, 9), (101, 10), (110, 10), (111, 11)])
def test_an_epoch_is_every_sequence_once(modules, num_tokens, num_sequences):
    sequences = numbered(modules, num_tokens, 10)
    assert sequences.num_sequences == num_sequences
    for epoch in range(3):
        seen = starts(sequences, epoch * num_sequences, num_sequences)
        assert sorted(seen) == list(range(0, 10 * num_sequences, 10))


def test_order_is_fresh_for_each_epoch_and_seed(modules):
    epochs = [starts(numbered(modules, 501, 10, seed), epoch * 50, 50)
              for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert sorted(epochs[0]) not in epochs


def test_batches_cross_epochs_at_full_size(modules):
    one_by_one = [starts(numbered(modules, 71, 10), i, 1)[0] for i in range(28)]  # 7 sequences, 4 epochs
    sequences = numbered(modules, 71, 10)
    assert [start for first in range(0, 28, 4) for start in starts(sequences, first, 4)] == one_by_one
    assert starts(sequences, 0, 28) == one_by_one  # larger than the text


def test_a_batch_depends_on_its_number_only(modules):
    used = numbered(modules, 71, 10)
    for first in (0, 3, 40, 1000, 5):
        used.batch(first, 9, "cpu")
    for first in (2, 6, 7, 10**9):
        assert starts(used, first, 8) == starts(numbered(modules, 71, 10), first, 8)


@pytest.mark.parametrize("num_tokens, seq_len, advice", [(10, 10, "--seq_len 9"), (2, 3, "--seq_len 1"),
                                                         (1, 1, "use more text")])
def test_too_short_text(modules, num_tokens, seq_len, advice):
    with pytest.raises(ValueError, match=f"{num_tokens} tokens, .* sequence of {seq_len} .*{advice}$"):
        numbered(modules, num_tokens, seq_len)


def load_bytes(modules, name):
    encode, vocab_size = modules.data.load_tokenizer("bytes")
    assert vocab_size == 256
    return modules.data.load_tokens(str(name), encode)


def test_stories_are_always_the_same_and_joined_with_end_of_text(modules):
    stories = list(modules.data.stories())
    digest = hashlib.sha256("".join(stories).encode()).hexdigest()
    assert digest == "a102b0e20aa49b0b599c3921b55a69e8f3b862adf22a453c487302a3ebd378e0"
    tokens = load_bytes(modules, "stories")
    assert bytes(tokens.tolist()).decode() == "".join(story + "\0" for story in stories)


def load_files(folder, files, tokenizer, log):
    """Runs in a warm process. Returns [(tokens, vocab_size), ...]; log gets the number of texts tokenised."""
    sys.path.insert(0, str(folder))
    import data
    encode, vocab_size = data.load_tokenizer(str(tokenizer))

    def encode_and_count(texts):
        with open(log, "a") as file:
            file.write(f"{len(texts)}\n")
        return encode(texts)

    return [(data.load_tokens(str(file), encode_and_count), vocab_size) for file in files]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_files_are_tokenised_right_and_once(step01, prose, bpe, tmp_path, tokenizer):
    log, files = tmp_path / "log", [prose / "help.txt", prose / "help.jsonl", prose / "help.parquet"]
    documents = list(topics.values())
    texts = [["\n\n".join(documents)], documents, documents]
    if tokenizer == "bytes":
        encode, end, vocab_size = lambda text: list(text.encode()), 0, 256
    else:
        from tokenizers import Tokenizer
        backend = Tokenizer.from_file(str(bpe / "tokenizer.json"))
        encode, end, vocab_size = lambda text: backend.encode(text).ids, backend.token_to_id("<end>"), 512

    name = bpe if tokenizer == "bpe" else tokenizer
    together = launch.fork(load_files, step01, files, name, log, nproc=2).check()  # they start at once
    elsewhere = shutil.copytree(step01, tmp_path / "copy")
    later = launch.fork(load_files, elsewhere, files, name, log).check()
    for results in (*together.results, *later.results):
        for (tokens, tokenizer_size), expected in zip(results, texts, strict=True):
            assert tokenizer_size == vocab_size
            assert tokens.tolist() == [token for text in expected for token in (*encode(text), end)]
    assert sum(map(int, log.read_text().split())) == 1 + 2 * len(documents)


def test_changed_file_is_tokenised_anew(modules, tmp_path):
    file = tmp_path / "text.txt"
    for text in ("one", "two\nand three"):
        file.write_text(text)
        assert bytes(load_bytes(modules, file).tolist()) == text.encode() + b"\0"


def test_rows_without_text_and_folders(modules, tmp_path):
    rows = [{"text": text, "number": 1} for text in ("a", None, "é")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in (tmp_path, tmp_path / "train.jsonl"):
        assert bytes(load_bytes(modules, name).tolist()) == "a\0\0é\0".encode()


def test_tokenizer_without_end_of_text_is_refused(modules, bpe, tmp_path):
    shutil.copy(bpe / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="eos_token"):
        modules.data.load_tokenizer(str(tmp_path))
