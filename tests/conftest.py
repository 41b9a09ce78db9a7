"""What all tests share: the option --steps, a cache of their own, real prose in files."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

# No test reads or fills the user's caches, goes to the network or takes more than one core a process.
CACHE = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=CACHE.name, HF_DATASETS_CACHE=f"{CACHE.name}/datasets", HF_HUB_OFFLINE="1",
                  OMP_NUM_THREADS="1")

import launch  # noqa: E402  (after the environment is set, since it imports torch)

sys.path.append(str(launch.ROOT / "tools"))


def pytest_configure(config):
    launch.GUARDED = config.getoption("--guard")


def pytest_addoption(parser):
    parser.addoption("--steps", type=Path, default=launch.ROOT, metavar="DIR",
                     help="the folder that holds the step folders to test (default: this repository)")
    parser.addoption("--notebooks", action="store_true", help="execute all notebooks too, a minute each")
    parser.addoption("--run_seed", type=int, default=0, metavar="N",
                     help="the seed of the shared test's runs and of the tasks' inputs (default: 0)")
    parser.addoption("--guard", action="store_true",
                     help="the programs that are tested may open nothing but this folder and Python's own")


@pytest.fixture(scope="session")
def steps(request):
    return request.config.getoption("--steps").resolve()


@pytest.fixture(scope="session")
def run_seed(request):
    return request.config.getoption("--run_seed")


@pytest.fixture(scope="session")
def step01(steps):
    return steps / "step01_single_gpu"


@pytest.fixture(scope="session")
def modules(step01):
    """The modules of step 1, loaded into this process: modules.train, modules.model, ..."""
    return launch.load(step01)


@pytest.fixture(scope="session")
def prose(tmp_path_factory):
    """A folder with the help text of the standard library as help.txt, .jsonl and .parquet."""
    import datasets
    from pydoc_data.topics import topics
    folder = tmp_path_factory.mktemp("prose")
    documents = [{"text": text} for text in topics.values()]
    (folder / "help.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
    (folder / "help.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    datasets.Dataset.from_list(documents).to_parquet(folder / "help.parquet")
    return folder


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A folder with a BPE tokenizer of 512 tokens, trained on that text."""
    from pydoc_data.topics import topics
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(topics.values(), vocab_size=512, special_tokens=["<end>"], show_progress=False)
    folder = tmp_path_factory.mktemp("bpe")
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder
