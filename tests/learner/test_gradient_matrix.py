"""Loss and gradient of a mini-batch are those of one rank that sees all its rows at once, right-padded, however they are computed.

Tolerances, float32: the loss and the gradient norm to 3e-6 of themselves; the gradient to 5e-6 of its length over all parameters, and to 1e-5 of any one
parameter's, or of a hundredth of the whole where that is longer. Sums are taken in another order, and nothing else may differ.
"""

import pytest
import torch

from tests.learner.fakes import save_tiny_llama
from tests.learner.gradient_matrix import BUILDS, Found, cases, expectations, run_cases
from tests.learner.many_ranks import run_processes


@pytest.fixture(scope="module")
def world(tmp_path_factory, comm):
    folder = tmp_path_factory.mktemp("matrix")
    model = save_tiny_llama(folder / "model", hidden=32)
    read = run_processes(model, folder)
    return {1: run_cases(model, comm), 2: read(2, 0)["cases"], 4: read(4, 0)["cases"]}, read


def gaps(found: Found, expected: Found) -> dict[str, float]:
    whole = torch.cat([tensor.flatten() for tensor in expected.gradient.values()]).norm()
    apart = {name: (found.gradient[name] - tensor).norm() for name, tensor in expected.gradient.items()}
    return {
        "loss": abs(found.loss - expected.loss) / max(abs(expected.loss), 0.1),
        "norm": abs(found.norm - expected.norm) / expected.norm,
        "gradient": float(torch.stack(list(apart.values())).norm() / whole),
        "parameter": max(float(gap / torch.maximum(expected.gradient[name].norm(), 0.01 * whole)) for name, gap in apart.items()),
    }


LIMITS = {"loss": 3e-6, "norm": 3e-6, "gradient": 5e-6, "parameter": 1e-5}


def check(world, build: str) -> None:
    found, _ = world
    compared = [(ranks, case) for ranks in (1, 2, 4) for case in cases(ranks) if case[0] == build]
    worst = dict.fromkeys(LIMITS, (0.0, None))
    for ranks, case in compared:
        for name, gap in gaps(found[ranks][case], found[1]["padded", *case[1:3], "whole"]).items():
            worst[name] = max(worst[name], (gap, (ranks, *case)), key=lambda pair: pair[0])
    print(build, len(compared), {name: f"{gap:.1e}" for name, (gap, _) in worst.items()})
    assert all(worst[name][0] <= limit for name, limit in LIMITS.items()), worst


def test_the_gradient_depends_on_neither_ranks_nor_split_in_any_loss_and_mode(world):
    check(world, "plain")


@pytest.mark.parametrize("build", [name for name in BUILDS if name != "plain"])
def test_the_gradient_does_not_depend_on(world, build):
    check(world, build)


def test_the_cases_differ(world):
    """Losses and aggregations give other gradients; else the comparison would prove nothing."""
    baseline = [world[0][1][case] for case in expectations()]
    for i, one in enumerate(baseline):
        for other in baseline[i + 1 :]:
            assert gaps(one, other)["gradient"] > 1e-3 or one.loss != other.loss


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(world, ranks):
    found, _ = world
    clipped, free = found[ranks]["plain", "vanilla", "token-mean", "clipped"], found[1]["padded", "vanilla", "token-mean", "whole"]
    length = torch.cat([tensor.flatten() for tensor in free.gradient.values()]).norm().item()
    assert clipped.norm == pytest.approx(length, rel=1e-5) and length > 0.2
    assert torch.cat([tensor.flatten() for tensor in clipped.gradient.values()]).norm().item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_one_rank_of_two_is_skipped_by_both_and_ends_the_run_at_the_third(world, rank):
    found = world[1](2, rank)["poisoned"]
    assert (found["applied"], found["skipped"], found["unmoved"]) == (1, 2, True)
    assert "max_consecutive_skips=3" in found["ended"]
    progress = found["progress"]
    assert (progress.schedule_position, progress.optimizer_steps, progress.skipped_steps, progress.consecutive_skips) == (1, 1, 3, 3)


def test_ranks_with_unlike_rows_make_the_same_number_of_passes(world):
    for rank in (0, 1):
        found = world[1](2, rank)["uneven"]
        assert found["passes"] == {"log-prob": 4, "ref": 4, "values": 4}
        assert found["same"] and found["values"] == 4 and found["seconds"] < 30
