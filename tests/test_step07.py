"""Step 7: checkpoints that survive anything, weights from and to transformers, what --dry_run says."""

import re
import shutil

import pytest
import run_workers as workers
import torch

import launch

FOLDER = "step07_4d"
SMALL = ["--num_hidden_layers", 3, "--hidden_size", 32, "--num_attention_heads", 4, "--num_key_value_heads",
         2, "--intermediate_size", 48, "--seq_len", 16, "--warmup_steps", 2]
KEYS = ("step", "loss", "grad_norm", "lr", "tokens")


@pytest.fixture(scope="module")
def folder(steps):
    return steps / FOLDER


@pytest.fixture(scope="module")
def step07(folder):
    return launch.load(folder)


def checkpoints(folder):
    return sorted(path.name for path in folder.iterdir())


def numbers(run):
    return [[row[key] for key in KEYS] for row in run.metrics]


def error_of(run, program="train.py"):
    (line,) = re.findall(f"^{program}: error: .*$", run.output, re.MULTILINE)
    return line


# Checkpoints


@pytest.mark.parametrize("nproc, layout", [
    (1, []), (2, ["--tp", 2]), (4, ["--pp", 2, "--cp", 2, "--mbs", 1]), (2, ["--dtype", "bfloat16"])])
def test_resumed_in_the_same_layout_to_the_bit(folder, tmp_path, nproc, layout):
    options = [*SMALL, *layout, "--steps", 6]
    whole = launch.train(folder, *options, nproc=nproc).check()
    saving = ["--save_dir", tmp_path, "--save_every", 2]
    saved = launch.train(folder, *options, *saving, nproc=nproc).check()
    assert numbers(saved) == numbers(whole), "saving changes nothing"
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]
    shutil.rmtree(tmp_path / "step-00000006")
    resumed = launch.train(folder, *options, *saving, "--resume", nproc=nproc).check()
    assert numbers(resumed) == numbers(whole)[4:]
    for mine, expected in zip(resumed.results, whole.results, strict=True):
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[name], expected[name]) for name in mine)


def test_every_process_writes_its_share(folder, tmp_path):
    """Also replicas do: nobody writes much more than its part, and nothing is written twice."""
    argv = [*SMALL, "--hidden_size", 128, "--num_hidden_layers", 4, "--tp", 2, "--pp", 2, "--mbs", 1,
            "--steps", 1, "--save_dir", tmp_path]
    run = launch.train(folder, *argv, nproc=8).check()
    held = [sum(weight.nbytes for weight in rank.values()) for rank in run.results]
    sizes = [path.stat().st_size for path in tmp_path.glob("*/*.distcp")]
    assert len(sizes) == 8 and max(sizes) < 1.25 * sum(sizes) / 8
    assert sum(sizes) == pytest.approx(3 * sum(held) / 2, rel=0.1), "weights and two moments, of two replicas"


@pytest.mark.parametrize("keep_last, kept", [(1, [5]), (2, [4, 5]), (0, [1, 2, 3, 4, 5])])
def test_keep_last(folder, tmp_path, keep_last, kept):
    (tmp_path / "step-00000009.partial").mkdir()  # left over from a run that was killed
    (tmp_path / "notes.txt").write_text("not ours")
    launch.train(folder, *SMALL, "--steps", 5, "--save_dir", tmp_path, "--save_every", 1,
                 "--keep_last", keep_last).check()
    assert checkpoints(tmp_path) == ["notes.txt", *(f"step-{step:08}" for step in kept)]


@pytest.mark.parametrize("victim, moment, call, kept", [
    (1, "before the data", 2, [2]),
    (0, "before the data", 1, []),
    (0, "before the metadata", 3, [2, 4]),
    (0, "before the folder gets its name", 1, []),
    (0, "before an old one is removed", 1, [4, 6]),
])
def test_killed_in_the_middle_of_a_save(folder, tmp_path, victim, moment, call, kept):
    """Complete checkpoints stay, what is incomplete isn't taken for one, the run goes on to the same end."""
    options = [*SMALL, "--tp", 2, "--steps", 8]
    saving = ["--save_dir", tmp_path, "--save_every", 2, "--keep_last", 2]
    run = launch.fork(workers.die_in_save, folder, [*options, *saving, "--use_cpu"], victim, moment, call,
                      nproc=2)
    assert run.statuses[victim] == -9
    complete = [name for name in checkpoints(tmp_path) if not name.endswith(".partial")]
    assert complete == [f"step-{step:08}" for step in kept]
    resumed = launch.train(folder, *options, *saving, "--resume", nproc=2).check()
    whole = launch.train(folder, *options, nproc=2).check()
    assert numbers(resumed) == numbers(whole)[max(kept, default=0):]
    assert checkpoints(tmp_path) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_keeps_the_last_checkpoint(folder, tmp_path, victim):
    argv = [*SMALL, "--pp", 2, "--steps", 4, "--save_dir", tmp_path, "--save_every", 1]
    run = launch.fork(workers.full_disk, folder, [*argv, "--use_cpu"], victim, 3, nproc=2)
    line = error_of(run)
    assert run.statuses[0] == 2 and "training step 3" in line and "last complete one: 2" in line
    assert re.search(r"step-00000003.partial, where [\d,]+ bytes are free: \S", line)
    resumed = launch.train(folder, *argv, "--resume", nproc=2).check()
    assert resumed.series("step") == [3, 4]


def test_a_folder_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    run = launch.train(folder, *SMALL, "--save_dir", tmp_path / "file" / "checkpoints")
    assert run.statuses == [2] and "file" in error_of(run)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """A folder with the checkpoint of training step 2, of a model with a tied weight, written by tp 2."""
    scratch = tmp_path_factory.mktemp("saved")
    argv = [*SMALL, "--steps", 2, "--tp", 2, "--save_dir", scratch]
    return scratch, argv, launch.train(folder, *argv, nproc=2).check()


@pytest.mark.parametrize("argv, named", [
    ([], ["up to training step 2", "--resume"]),
    (["--resume", "--hidden_size", 64], ["embed_tokens.weight", "(256, 32)", "(256, 64)"]),
    (["--resume", "--num_hidden_layers", 4], ["no model.layers.3."]),
    (["--resume", "--intermediate_size", 52], ["mlp.gate_proj", "(48, 32)", "(52, 32)"]),
    (["--resume", "--global_batch_size", 4], ["global_batch_size 8, not 4", "--global_batch_size 8"]),
    (["--resume", "--seed", 1], ["seed 0, not 1"]),
])
def test_what_does_not_fit_is_refused(folder, saved, argv, named):
    scratch, options, _ = saved
    run = launch.train(folder, *options, "--steps", 4, *argv, "--tp", 1)
    assert run.statuses == [2] and len(run.output.splitlines()) == 1
    assert all(text in error_of(run) for text in named), run.output


@pytest.mark.parametrize("argv, named", [
    (["--resume"], ["--save_dir"]),
    (["--save_every", 2], ["--save_dir"]),
    (["--save_every", 0], ["1 or more"]),
])
def test_flags_without_a_folder(folder, argv, named):
    run = launch.train(folder, *argv)
    assert run.statuses == [2] and all(text in error_of(run) for text in named), run.output


def test_resume_with_nothing_there_and_with_nothing_to_do(folder, tmp_path):
    argv = [*SMALL, "--steps", 2, "--save_dir", tmp_path, "--resume"]
    first = launch.train(folder, *argv).check()
    assert first.series("step") == [1, 2] and "goes on after training step 0" in first.output
    second = launch.train(folder, *argv).check()
    assert not second.metrics and "final loss" not in second.output


def test_metrics_go_on_in_the_same_file(folder, tmp_path):
    """Rows of steps that are trained again, and one that was cut, give way to the new ones."""
    file = tmp_path / "metrics.jsonl"
    argv = [*SMALL, "--save_dir", tmp_path / "saved", "--save_every", 2, "--use_cpu", "--metrics_file", file]
    launch.fork(workers.run_main, folder, [*argv, "--steps", 4]).check()
    whole = file.read_text()
    shutil.rmtree(tmp_path / "saved" / "step-00000004")
    file.write_text(whole + '{"step": 5, "lo')  # the disk was full, or the run was killed
    launch.fork(workers.run_main, folder, [*argv, "--steps", 4, "--resume"]).check()

    def rows(text):
        return [re.findall('"(step|loss|grad_norm|tokens)": ([^,]*),', line) for line in text.splitlines()]
    assert rows(file.read_text()) == rows(whole) and len(rows(whole)) == 4


# Weights from and to transformers


def hf_model(path, tied=False, dtype=torch.float32, max_shard_size="5GB"):
    import transformers
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=260, rms_norm_eps=1e-5, tie_word_embeddings=tied)).to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


# Trains one step that changes nothing: a checkpoint of the weights as they were loaded.
NO_CHANGE = ["--steps", 1, "--learning_rate", 0, "--seq_len", 16]


@pytest.mark.parametrize("tied, dtype, shard_size, nproc, layout", [
    (False, "float32", "5GB", 4, ["--tp", 2, "--pp", 2]),
    (True, "float32", "20KB", 2, ["--pp", 2]),
    (True, "bfloat16", "5GB", 2, ["--tp", 2]),
])
def test_round_trip_to_the_bit(folder, tmp_path, tied, dtype, shard_size, nproc, layout):
    """From transformers into the trainer, in shards, and back: same bits, same logits, same loss."""
    import transformers
    model = hf_model(tmp_path / "hf", tied, getattr(torch, dtype), shard_size)
    assert (len(list((tmp_path / "hf").glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    argv = ["--load_hf", tmp_path / "hf", *NO_CHANGE, *layout, "--save_dir", tmp_path / "saved"]
    run = launch.train(folder, *argv, nproc=nproc).check()
    checkpoint, exported = tmp_path / "saved" / "step-00000001", tmp_path / "exported"
    export = [checkpoint, exported, "--dtype", dtype, "--prompt", "Once"]
    result = launch.command(launch.sys.executable, folder / "export_hf.py", *export, timeout=120).check()
    assert "Once" in result.output

    found = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=getattr(torch, dtype))
    for (name, weight), (other, expected) in zip(
            found.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other and weight.dtype == expected.dtype and torch.equal(weight, expected), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    text = "Two\n\tdays, 3 cakes \N{SNOWMAN}"
    assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    step = launch.load(folder)
    encode, _ = step.data.load_tokenizer("bytes")
    inputs, targets = step.data.Sequences(
        step.data.load_tokens("stories", encode), 16, seed=0).batch(0, 8, "cpu")
    logits = found.float()(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert run.series("loss") == pytest.approx([loss], rel=1e-6)


def test_only_the_needed_slices_are_read(folder, tmp_path):
    hf_model(tmp_path / "hf")
    argv = ["--load_hf", tmp_path / "hf", *NO_CHANGE, "--tp", 2, "--pp", 2, "--use_cpu"]
    run = launch.fork(workers.read_shards, folder, argv, nproc=4).check()
    assert all(read == held for read, held in run.results) and len(run.results) == 4


def test_weights_of_another_model_are_refused(folder, tmp_path):
    hf_model(tmp_path / "hf")
    for argv, named in [(["--vocab_size", 256], ["embed_tokens.weight", "(260, 32)", "(256, 32)"]),
                        (["--num_hidden_layers", 4], ["no model.layers.3."])]:
        run = launch.train(folder, "--load_hf", tmp_path / "hf", *argv)
        assert run.statuses == [2] and all(text in error_of(run) for text in named), run.output
    next((tmp_path / "hf").glob("*.safetensors")).unlink()
    run = launch.train(folder, "--load_hf", tmp_path / "hf")
    assert run.statuses == [2] and ".safetensors" in error_of(run)
    run = launch.train(folder, "--load_hf", "nobody/nothing")
    assert run.statuses == [2] and "without network" in error_of(run)


def test_export_of_a_trained_checkpoint_of_any_layout(folder, saved, tmp_path):
    """The export of a checkpoint that tp 2 wrote has the weights that the two processes had at the end."""
    from safetensors.torch import load_file
    scratch, _, run = saved
    argv = [scratch / "step-00000002", tmp_path / "exported"]
    launch.command(launch.sys.executable, folder / "export_hf.py", *argv, timeout=120).check()
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    assert weights.keys() == run.results[0].keys()
    shard_dim = launch.load(folder).tensor_parallel.shard_dim
    for name, weight in weights.items():
        parts = [rank[name] for rank in run.results]
        whole = parts[0] if shard_dim(name) is None else torch.cat(parts, shard_dim(name))
        assert torch.equal(weight, whole), name
    again = launch.command(launch.sys.executable, folder / "export_hf.py", *argv, timeout=120)
    assert again.statuses == [2] and "exported" in error_of(again, "export_hf.py")  # never overwritten


# --dry_run

TIED = ["--model_name", "smollm-135m", "--num_hidden_layers", 3, "--hidden_size", 48, "--vocab_size", 504,
        "--num_attention_heads", 6, "--num_key_value_heads", 6, "--intermediate_size", 96]


@pytest.mark.parametrize("nproc, layout", [
    (1, []),
    (3, []),
    (2, ["--tp", 2]),
    (3, ["--pp", 3, *TIED]),
    (2, ["--cp", 2, "--pp_engine", "afab"]),
    (4, ["--tp", 2, "--cp", 2, *TIED]),
    (16, ["--dp", 2, "--pp", 2, "--cp", 2, "--tp", 2, "--mbs", 1]),
])
def test_a_plan_is_what_a_run_uses(folder, step07, nproc, layout):
    """For every rank: parameters, and calls and bytes of every collective, exactly."""
    argv = [*SMALL, "--seq_len", 24, "--grad_acc_steps", 2, "--bucket_cap_mb", 0.01, *layout, "--steps", 1]
    run = launch.fork(workers.usage, folder, [*argv, "--use_cpu"], nproc=nproc).check()
    argv = ["--dp", 3, *argv] if nproc == 3 and not layout else argv
    args, config = step07.arguments.parse_args([*map(str, argv), "--dry_run"])
    for parameters, counts, mine in run.results:
        plan = step07.plan.plan_stage(args, config, mine["pp"])
        assert plan.parameters == parameters
        assert plan.counts == counts


@pytest.mark.parametrize("nproc, layout, tolerance", [
    (1, [], 0.01),
    (2, ["--pp", 2, "--grad_acc_steps", 4], 0.01),
    (2, ["--pp", 2, "--grad_acc_steps", 4, "--pp_engine", "afab"], 0.01),
    (2, ["--cp", 2], 0.01),
    (2, ["--dp", 2], 0.01),
    (1, ["--dtype", "bfloat16"], 0.01),
    (2, ["--tp", 2], 0.1),  # collectives hold on to tensors in threads of their own
    (4, ["--tp", 2, "--pp", 2, "--dtype", "bfloat16", "--grad_acc_steps", 3], 0.1),
])
def test_a_plan_has_the_memory_of_a_run(folder, step07, tmp_path, monkeypatch, nproc, layout, tolerance):
    """Against what the CPU's allocator says that it gave out at most, over two training steps."""
    monkeypatch.chdir(tmp_path)
    argv = ["--hidden_size", 256, "--num_hidden_layers", 4, "--intermediate_size", 768, "--vocab_size", 1024,
            "--seq_len", 256, "--mbs", 4, "--grad_acc_steps", 2, "--steps", 2, *layout]
    run = launch.fork(workers.peak_bytes, folder, [*argv, "--use_cpu"], nproc=nproc, timeout=300).check()
    args, config = step07.arguments.parse_args([*map(str, argv), "--dry_run"])
    for rank, measured in enumerate(run.results):
        stage = rank * args.pp_size // nproc if args.pp_size > 1 else 0
        total = step07.plan.plan_stage(args, config, stage).total
        print(f"rank {rank}: planned {total / 2**20:.1f} MiB, measured {measured / 2**20:.1f} MiB")
        assert total == pytest.approx(measured, rel=tolerance)


def test_dry_run_of_405b(folder):
    """No processes, no weights: the largest model in a minute, on any machine."""
    argv = ["--dry_run", "--model_name", "meta-llama/Llama-3.1-405B", "--tp", 8, "--cp", 1, "--pp", 16,
            "--dp", 128, "--seq_len", 8192, "--mbs", 1, "--grad_acc_steps", 16, "--dtype", "bfloat16"]
    run = launch.fork(workers.run_main, folder, argv, timeout=120).check()
    rows = dict(re.findall(r"^(\S.*?)  +(\S.*)$", run.output, re.MULTILINE))
    assert rows["layers"].split("  ")[0] == "0 ... 7" and rows["layers"].endswith("119 ... 125")
    # 126 layers over 16 stages are 8 or 7; each is cut in 8, but for its two norms.
    kv, hidden, intermediate = 8 * 128, 16384, 53248
    layer = (2 * hidden * hidden + 2 * kv * hidden + 3 * intermediate * hidden) // 8 + 2 * hidden
    matrix = 128256 * hidden // 8
    assert rows["parameters"].split()[0] == f"{8 * layer + matrix:,}"
    assert rows["parameters"].split()[1] == f"{7 * layer + matrix + hidden:,}"
    assert rows["weights"].startswith(f"{4 * (8 * layer + matrix) / 2**20:,.1f} MiB")
    assert "idle share of the pipeline: 48.4%" in run.output
    assert "16376 ... 16383" in run.output, "the last group of ranks"


def test_the_picture_of_the_mesh_is_the_mesh(folder, step07):
    argv = [*SMALL, "--dp", 2, "--pp", 2, "--cp", 2, "--tp", 2, "--mbs", 1, "--steps", 1]
    run = launch.fork(workers.usage, folder, [*argv, "--use_cpu"], nproc=16).check()
    picture = step07.mesh.draw_mesh({"dp": 2, "pp": 2, "cp": 2, "tp": 2})
    assert picture in run.output
    drawn = {}
    for line in picture.splitlines()[1:]:
        dp, cp, *fields = re.findall(r"\d+", line)
        for stage in range(2):
            first, last = map(int, fields[2 * stage:2 * stage + 2])
            drawn |= {rank: {"dp": int(dp), "pp": stage, "cp": int(cp), "tp": rank - first}
                      for rank in range(first, last + 1)}
    assert [drawn[rank] for rank in range(16)] == [mine for *_, mine in run.results]


@pytest.mark.parametrize("argv, named", [
    (["--tp", 3], ["--tp 3", "num_attention_heads"]),
    (["--pp", 5], ["--pp 5"]),
    (["--cp", 3], ["--seq_len"]),
])
def test_a_plan_of_what_is_impossible(folder, argv, named):
    run = launch.train(folder, "--dry_run", *argv)
    assert run.statuses == [2] and all(text in error_of(run) for text in named), run.output
