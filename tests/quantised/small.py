"""A model of two quantised layers and a trainable scale, for tests of single changes: captured in a moment."""

from typing import Any

import torch

from tests.support.quantised import FORMS, bnb_experts

SIZE = 128
EXPERTS = "bitsandbytes NF4 experts"


class Experts(torch.nn.Module):
    """Two products, as a fused mixture holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(2, SIZE, SIZE, dtype=torch.bfloat16) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(2, -1, -1), self.gate_up_proj).sum(0)


class Layers(torch.nn.Module):
    """Looks tokens up and puts them through its layers, which ``quantised`` packs."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        settings: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
        self.table = torch.nn.Embedding(96, SIZE, dtype=torch.bfloat16)
        self.q_proj = torch.nn.Linear(SIZE, SIZE, **settings)
        self.o_proj = torch.nn.Linear(SIZE, SIZE, **settings)
        self.experts = Experts() if experts else None
        self.scale = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.q_proj(self.table(input_ids).flatten(0, 1) * self.scale).relu()
        if self.experts is not None:
            x = self.experts(x)
        return self.o_proj(x * self.scale).float().square().mean()


def small_model(form: str) -> torch.nn.Module:
    """The same weights each time, packed as ``form`` says."""
    torch.manual_seed(0)
    model = Layers(experts=form == EXPERTS)
    quantise = bnb_experts() if form == EXPERTS else FORMS[form]
    quantise(model)
    # Some libraries' weights want a gradient at first.
    model.requires_grad_(False).scale.requires_grad_(True)
    return model.train()


def tokens(seed: int) -> dict[str, torch.Tensor]:
    """A batch, also for adapted models: 2 rows of 20 tokens."""
    ids = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}
