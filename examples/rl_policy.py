"""The task of `rl_weight_sync.py`, sorting digits, and the policy that learns it: nothing here knows of other processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

DIGITS, LENGTH = 10, 5  # the task: sort LENGTH digits
WIDTH, HEADS, LAYERS = 64, 4, 2
PROMPTS, GROUP = 16, 16  # a rollout: GROUP sampled answers to each of PROMPTS prompts
CLIP, ENTROPY = 0.2, 0.005

Rollout = dict[str, Any]
"""What a worker sends: `prompts`, `answers`, `logps`, `grades`, and where and when they come from."""


def grade(prompts: Tensor, answers: Tensor) -> Tensor:
    """Which digits of `answers` (n, LENGTH) are where they belong in the sorted `prompts`: float32 (n, LENGTH)."""
    return (answers == prompts.sort(dim=1).values).float()


Cache = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (n, HEADS, tokens so far, WIDTH / HEADS)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        n, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, tokens, WIDTH))
        return x + self.mlp(self.norm2(x)), (k, v)


class Policy(nn.Module):
    """A decoder-only transformer over the digits and one separator, DIGITS, between prompt and answer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(DIGITS + 1, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits (n, tokens, DIGITS) and the cache to go on with. With `past`, `tokens` is (n, 1): the next token."""
        start = past[0][0].shape[2] if past else 0
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        cache: Cache = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, past[i] if past else None)
            cache.append(kv)
        return self.head(self.norm(x)), cache


def with_separator(prompts: Tensor) -> Tensor:
    return F.pad(prompts, (0, 1), value=DIGITS)


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """GROUP answers to each prompt: tokens int64 and their log-probabilities, both (PROMPTS * GROUP, LENGTH)."""
    logits, cache = policy(with_separator(prompts))
    logits = logits.repeat_interleave(GROUP, dim=0)  # a prompt is read once for all its answers
    cache = [(k.repeat_interleave(GROUP, dim=0), v.repeat_interleave(GROUP, dim=0)) for k, v in cache]
    answers, logps = [], []
    for i in range(LENGTH):
        logp = logits[:, -1].log_softmax(dim=-1)
        answers.append(torch.multinomial(logp.exp(), 1))
        logps.append(logp.gather(1, answers[-1]))
        if i < LENGTH - 1:
            logits, cache = policy(answers[-1], cache)
    return torch.cat(answers, dim=1), torch.cat(logps, dim=1)


def improve(policy: Policy, optimizer: torch.optim.Optimizer, batch: list[Rollout]) -> None:
    """One step of GRPO: a token is favoured as far as the answer went better from there on than others of its group.

    The rollouts may come from older weights, hence PPO's clipped importance ratio of each token.
    """
    prompts, answers, old, grades = (
        torch.cat([rollout[key] for rollout in batch]) for key in ("prompts", "answers", "logps", "grades")
    )
    to_go = grades.flip(1).cumsum(dim=1).flip(1).view(-1, GROUP, LENGTH)
    advantage = (to_go - to_go.mean(dim=1, keepdim=True)) / (to_go.std(dim=1, keepdim=True) + 0.01)
    advantage = advantage.view(-1, LENGTH)
    asked = with_separator(prompts).repeat_interleave(GROUP, dim=0)
    logits, _ = policy(torch.cat([asked, answers[:, :-1]], dim=1))
    logps = logits[:, LENGTH:].log_softmax(dim=-1)
    ratio = (logps.gather(2, answers.unsqueeze(2)).squeeze(2) - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = -(logps.exp() * logps).sum(dim=-1).mean()
    optimizer.zero_grad()
    (-gain - ENTROPY * entropy).backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
