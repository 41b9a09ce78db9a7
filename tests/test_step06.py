"""Step 6: the ring against attention that isn't spread, the zigzag order, the bytes that travel."""

import json
from types import SimpleNamespace

import context_workers as workers
import pytest
import torch

import launch

FOLDER = "step06_context_parallel"
SMALL = ["--num_hidden_layers", 2, "--hidden_size", 32, "--num_attention_heads", 4,
         "--num_key_value_heads", 2, "--intermediate_size", 48]


@pytest.fixture(scope="module")
def module(steps):
    return launch.load(steps / FOLDER).context_parallel


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("heads, kv_heads, local_seq", [(4, 2, 10), (3, 1, 2), (2, 2, 64)])
def test_ring_is_causal_attention(steps, cp, heads, kv_heads, local_seq):
    run = launch.fork(workers.ring_errors, steps / FOLDER, local_seq, heads, kv_heads, torch.float64, 1.0,
                      nproc=cp).check()
    assert max(map(max, run.results)) < 1e-12, run.results


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4),
                                              (torch.bfloat16, 3e-2)])
def test_ring_with_large_scores(steps, dtype, tolerance):
    """Scores far beyond where exp() overflows: a merge that isn't stable turns into inf or nan."""
    scale = 50.0 if dtype != torch.bfloat16 else 5.0
    run = launch.fork(workers.ring_errors, steps / FOLDER, 16, 4, 2, dtype, scale, nproc=3).check()
    assert max(map(max, run.results)) < tolerance, run.results


@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_zigzag_has_every_position_once_and_work_is_equal(module, cp):
    length = 6
    places = [module.zigzag_positions(SimpleNamespace(rank=rank, size=cp), length, device="cpu")
              for rank in range(cp)]
    assert sorted(torch.cat(places).tolist()) == list(range(length * cp))
    for step in range(cp):
        pairs = []
        for rank in range(cp):
            owner = (rank - step) % cp
            queries, keys, causal = module.visible(rank, owner, length)
            seen = places[rank][queries, None] >= places[owner][None, keys]
            # What the kernel computes is what causality allows, no less and no more.
            allowed = torch.ones(length, length).tril().bool() if causal else torch.ones_like(seen)
            assert torch.equal(seen, allowed)
            pairs.append(seen.sum().item())
            assert pairs[-1] == (places[rank][:, None] >= places[owner][None]).sum()
        assert len(set(pairs)) == 1, f"ring step {step}: unequal work {pairs}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_plain_pieces_are_the_fused_ones(module, causal, dtype, tolerance):
    """The stand-in for CUDA in float32 and float64, on the CPU. More queries than keys, and grouped heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, seq, 8, generator=generator, dtype=dtype)
                     for heads, seq in ((6, 10), (3, 10 if causal else 7), (3, 10 if causal else 7), (6, 10)))
    out, lse = module.piece_forward(q, k, v, causal)
    plain = module.plain_forward(q, k, v, causal)
    fused = [out, lse, *module.piece_backward(grad, q, k, v, out, lse, causal)]
    for found, expected in zip([*plain, *module.plain_backward(grad, q, k, v, out, lse, causal)], fused):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 10)


def test_memory_is_linear_in_the_sequence(steps):
    """No tensor of the ring has a row of scores: the largest ones are as large as keys and values."""
    run = launch.fork(workers.largest_tensor, steps / FOLDER, 512, nproc=2).check()
    assert all(largest <= 2 * queries for largest, queries in run.results)  # scores: 32 times the queries


def test_bytes(steps):
    """As context_parallel.py says, in every layer and micro-batch: cp - 1 times keys and values forward, and
    backward cp - 1 times them and cp times their gradients."""
    cp, layers, micro_batches, mbs, seq, kv_heads, head_dim = 3, 2, 2, 2, 24, 2, 8
    argv = map(str, [*SMALL, "--seq_len", seq, "--mbs", mbs, "--grad_acc_steps", micro_batches, "--steps", 1,
                     "--cp", cp, "--use_cpu"])
    run = launch.fork(workers.bytes_sent, steps / FOLDER, list(argv), nproc=cp).check()
    piece = 2 * mbs * kv_heads * seq // cp * head_dim
    assert run.results == [[piece] * (layers * micro_batches * (2 * (cp - 1) + cp))] * cp


def test_bfloat16_stays_near_the_single_process(steps):
    argv = [*SMALL, "--seq_len", 32, "--steps", 4, "--dtype", "bfloat16"]
    single = launch.train(steps / FOLDER, *argv).check()
    spread = launch.train(steps / FOLDER, *argv, "--cp", 2, nproc=2).check()
    assert spread.series("loss") == pytest.approx(single.series("loss"), rel=2e-3)
    assert spread.series("grad_norm") == pytest.approx(single.series("grad_norm"), rel=3e-2)
    assert spread.series("loss") != single.series("loss")


@pytest.mark.parametrize("argv, nproc, named", [
    ("--cp 2 --seq_len 30", 2, ["--seq_len 30", "= 4", "--seq_len 32"]),
    ("--cp 3 --seq_len 32", 3, ["--seq_len 32", "= 6", "--seq_len 36"]),
    ("--cp 2 --tp 2", 2, ["= 4 processes", "not 2", "--nproc_per_node 4"]),
])
def test_errors(steps, argv, nproc, named):
    run = launch.train(steps / FOLDER, *argv.split(), nproc=nproc)
    lines = run.output.splitlines()
    assert run.statuses[0] == 2 and len(lines) == 1 and lines[0].startswith("train.py: error: "), run.output
    assert all(text in lines[0] for text in named), lines[0]


def test_torchrun(steps, tmp_path):
    """dp 1, cp 2 for real: gradients are summed over cp also when there is nothing to sum over dp."""
    argv = [*SMALL, "--seq_len", 32, "--steps", 4, "--dtype", "float64"]
    single = launch.train(steps / FOLDER, *argv).check()
    argv += ["--use_cpu", "--cp", 2, "--metrics_file", tmp_path / "m"]
    launch.torchrun(steps / FOLDER, *argv, nproc=2).check()
    rows = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx(single.series(key), rel=1e-10, abs=0)
