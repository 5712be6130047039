"""One of two processes that train quantised models together: ``processes.py RANK FILE FORM...``, over gloo.

Prints a line of JSON for each form.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from disco_accel import DiscoConfig, prepare, stats
from disco_accel.errors import ConfigError
from disco_accel.step.placement.distributed import check_same, exclude_from_collectives, frozen_tensors, include_again
from tests.quantised.edits import linear, scale
from tests.quantised.small import small_model, tokens

torch.set_num_threads(1)
CPU = torch.device("cpu")


def gradient(model: Any, inner: Any, rank: int) -> torch.Tensor:
    """Of one step on this process's own batch, averaged by DDP."""
    model(**tokens(rank)).backward()
    got: torch.Tensor = inner.scale.grad.clone()
    model.zero_grad(set_to_none=True)
    return got


def together(form: str, rank: int) -> dict[str, Any]:
    planned, eager = small_model(form), small_model(form)
    seen: dict[str, Any] = {}
    check_same(frozen_tensors(planned), CPU)
    exclude_from_collectives(planned)
    ignored = set(planned._ddp_params_and_buffers_to_ignore)
    named = {n for n, p in planned.named_parameters() if not p.requires_grad}
    seen["ignored"] = bool(named) and named <= ignored
    prepare(planned, DiscoConfig(memory_budget="64MiB", plan_cache=None))
    models = [torch.nn.parallel.DistributedDataParallel(planned)]
    exclude_from_collectives(eager)
    models.append(torch.nn.parallel.DistributedDataParallel(eager))
    got, expected = (gradient(m, m.module, rank) for m in models)
    other = [torch.empty_like(got) for _ in range(2)]
    dist.all_gather(other, got)
    seen["averaged"] = torch.equal(got, expected) and torch.equal(*other) and stats(planned)["steps_compiled"] == 1
    include_again(planned)
    seen["included again"] = not hasattr(planned, "_ddp_params_and_buffers_to_ignore")
    if rank:
        with torch.no_grad():
            scale(linear(planned)).view(-1)[-1:].mul_(2)
    try:
        check_same(frozen_tensors(planned), CPU)
        seen["told apart"] = "not at all"
    except ConfigError as error:
        seen["told apart"] = "q_proj" in str(error) or str(error)
    dist.barrier()
    return seen


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    for form in sys.argv[3:]:
        print(json.dumps({"form": form, "rank": rank, "seen": together(form, rank)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
