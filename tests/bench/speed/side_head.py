"""150 thousand words and 1,024 reply tokens: head, log-softmax, loss and gradients, masflow's or plain.

    python -m tests.bench.speed.side_head (fused|plain)

Memory is what is taken above weights and hidden states: the weights' gradient is a part of it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from masflow.models.experience import Row
from masflow.models.fused import fused_loss
from masflow.models.packs import Budget, MicroBatch, pack
from tests.bench.speed.meter import Meter, pin

TOKENS, VOCABULARY, WIDTH, TIMES = 1024, 151936, 256, 2


def batch_of(target_N: Tensor) -> MicroBatch:
    """One row whose reply has these tokens."""
    ids = tuple(target_N.tolist())
    row = Row("row", "", (0,), ids, (0.0,) * len(ids), 0, "", "")
    (batch,) = pack([row], [1.0], vocab_size=VOCABULARY, budget=Budget(logits=1 << 40))
    return batch


def fused(head: nn.Linear, hidden_UD: Tensor, batch: MicroBatch, weight_N: Tensor) -> Tensor:
    def loss_of(logprob_n: Tensor, entropy_n: Tensor, place_n: Tensor) -> Tensor:
        return -logprob_n * weight_N[place_n]

    return fused_loss(head, 1.0, hidden_UD, batch, loss_of)


def plain(head: nn.Linear, hidden_UD: Tensor, batch: MicroBatch, weight_N: Tensor) -> Tensor:
    logprob_UV = torch.log_softmax(head(hidden_UD), -1)
    return -(logprob_UV[batch.prediction_N, batch.target_N] * weight_N).sum()


def main() -> None:
    pin()
    torch.manual_seed(0)
    way = {"fused": fused, "plain": plain}[sys.argv[1]]
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    hidden_UD = torch.randn(TOKENS, WIDTH, requires_grad=True)
    batch = batch_of(torch.randint(VOCABULARY, (TOKENS,)))
    weight_N = torch.randn(TOKENS)
    meter = Meter(TOKENS, TIMES)
    meter.loaded()
    loss = torch.zeros(())
    for _ in range(TIMES + 1):
        head.weight.grad = hidden_UD.grad = None
        loss = way(head, hidden_UD, batch, weight_N)
        loss.backward()
        meter.step()
    assert hidden_UD.grad is not None and head.weight.grad is not None
    norms = [round(float(x.grad.norm()), 2) for x in (hidden_UD, head.weight) if x.grad is not None]
    meter.tell(loss=round(float(loss.detach()), 1), norms=norms, same=f"{float(loss.detach()):.0f} {norms}")


if __name__ == "__main__":
    main()
