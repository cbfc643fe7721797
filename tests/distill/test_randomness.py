import torch

from falcon_lab.distill.randomness import derive_seed, generator_for, seeded_dropout


def test_a_seed_depends_on_every_part_and_on_nothing_else() -> None:
    seeds = {derive_seed(s, i, r, p) for s in (0, 1) for i in (0, 1) for r in (0, 1) for p in "ab"}
    assert len(seeds) == 16
    assert derive_seed(1, 2, "x") == derive_seed(1, 2, "x")
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_of_one_purpose_agree() -> None:
    first, second = (torch.rand(3, generator=generator_for(1, "noise")) for _ in range(2))
    assert torch.equal(first, second)


def test_dropout_repeats_itself_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    masks = []
    for _ in range(2):
        with seeded_dropout(5, torch.device("cpu")):
            masks.append(torch.nn.functional.dropout(torch.ones(50), 0.5))
    assert torch.equal(*masks)
    assert torch.equal(torch.get_rng_state(), before)
