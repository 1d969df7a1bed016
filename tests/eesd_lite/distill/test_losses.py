import torch
from torch.nn import functional as F

from eesd_lite.distill.losses import draw_vocabulary, frequent_ids, kl_gradient


def rows(seed: int, count: int = 40) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


def reference(ours: torch.Tensor, theirs: torch.Tensor, lm_head: torch.Tensor) -> tuple[torch.Tensor, float]:
    ours = ours.clone().requires_grad_()
    head, target = (ours @ lm_head.T).log_softmax(-1), (theirs @ lm_head.T).log_softmax(-1)
    F.kl_div(head, target, log_target=True, reduction="sum").backward()
    assert ours.grad is not None
    return ours.grad, float(torch.minimum(head.exp(), target.exp()).sum().detach() / len(ours))


def test_the_gradient_is_that_of_the_kl_divergence(tiny, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    lm_head = tiny.parts().lm_head
    wanted, overlap = reference(rows(1), rows(2), lm_head)
    for logits_per_chunk in (1 << 23, 7 * 200):  # in one piece and in chunks
        monkeypatch.setattr("eesd_lite.distill.losses._CHUNK_LOGITS", logits_per_chunk)
        sample = draw_vocabulary(lm_head, torch.arange(0), 0, torch.Generator())
        found, shared = kl_gradient(rows(1), rows(2), sample)
        assert torch.allclose(found, wanted, atol=1e-5)
        assert abs(shared - overlap) < 1e-5


def test_raised_logits_keep_the_partition_function_right_on_average(tiny) -> None:  # type: ignore[no-untyped-def]
    lm_head = tiny.parts().lm_head
    states, frequent = rows(5) * 0.5, torch.arange(60)  # other numbers than lm_head, which has seed 1
    whole = (states @ lm_head.T).exp().sum(-1)
    raised, plain = torch.zeros_like(whole), torch.zeros_like(whole)
    for seed in range(200):
        sample = draw_vocabulary(lm_head, frequent, 100, torch.Generator().manual_seed(seed))
        logits = states @ sample.lm_head.T
        assert sample.raised is not None
        raised += (logits + sample.raised).exp().sum(-1) / 200
        plain += logits.exp().sum(-1) / 200
    # 200 draws of 40 among 140 tokens: a few percent of noise; without raising, a third of the sum is missing.
    assert float((raised / whole - 1).abs().max()) < 0.1
    assert float((plain / whole).mean()) < 0.8


def test_a_vocabulary_sample_holds_each_token_at_most_once(tiny) -> None:  # type: ignore[no-untyped-def]
    marked = torch.arange(200.0)[:, None].expand(200, 64).contiguous()
    sample = draw_vocabulary(marked, torch.tensor([5, 3, 9]), 50, torch.Generator().manual_seed(0))
    ids = sample.lm_head[:, 0].tolist()
    assert ids[:3] == [5.0, 3.0, 9.0] and len(set(ids)) == 50
    assert sample.raised is not None and sample.raised[:3].tolist() == [0.0] * 3
    assert torch.allclose(sample.raised[3:].exp(), torch.tensor(197 / 47))
    assert draw_vocabulary(marked, torch.arange(0), 500, torch.Generator()).raised is None


def test_frequent_ids_come_from_the_cached_text(small_cache) -> None:  # type: ignore[no-untyped-def]
    counts = torch.bincount(torch.as_tensor(small_cache.tokens.astype("int64")), minlength=200)
    found = frequent_ids(small_cache, 200, 30)
    assert len(found) == 20
    others = [i for i in range(200) if i not in found.tolist()]
    assert int(counts[found].min()) >= int(counts[others].max())
