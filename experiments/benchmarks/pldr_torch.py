"""The peer: an eager PyTorch PLDR-LLM of the same sizes, timed on the same cores. Needs torch and nothing of ours.

    python -m experiments.benchmarks.pldr_torch --preset=110m [--threads=1]

Written from the formulas in the way such programs are written: one module per layer, whole score tables, caches that
grow by concatenation. It prints one line of JSON: seconds of a token decoded without cache, with keys and values (A
kept) and with G kept too, and of a training step. `pldr.py --torch_python` runs it before and after its own rounds.
"""

import argparse
import dataclasses
import json
import sys

from experiments.benchmarks import harness

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError:
    sys.exit("This comparison needs PyTorch: run it with a Python that has torch, or leave --torch_python out.")

SIZES = {  # vocabulary, layers, heads, head width
    "tiny": (262, 2, 4, 16),
    "small": (262, 4, 8, 32),
    "medium": (32_000, 4, 8, 56),
    "110m": (32_000, 5, 14, 64),
}
UNITS, BLOCKS = 8, 2


class Gated(nn.Module):
    """W₃(silu(W₁x) ⊙ W₂x), with biases."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Metric(nn.Module):
    """A from rotated queries, and G from A."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.units = nn.ModuleList(
            nn.Sequential(*(Gated(width, width * 8 // 3) for _ in range(BLOCKS))) for _ in range(UNITS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(UNITS))
        std = (2 / (width * (width + heads))) ** 0.5
        self.W, self.P, self.a = (nn.Parameter(std * torch.randn(heads, width, width)) for _ in range(3))
        self.b_W, self.b_a = (nn.Parameter(torch.zeros(heads, width, width)) for _ in range(2))

    def metric(self, q):
        A = self.norm(q.transpose(-1, -2) @ q)
        for unit, norm in zip(self.units, self.norms):
            A = norm(unit(A) + A)
        return A

    def operator(self, A):
        z = self.W @ A + self.b_W
        return self.a @ (z * functional.silu(z) + 1e-9) ** self.P + self.b_a


def rotate(x, positions):
    """Interleaved rotary planes; x [B, N, T, H], positions [T]."""
    H = x.shape[-1]
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, H, 2) / H)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


class Layer(nn.Module):
    """Post-LayerNorm decoder layer; `held` is None or (k, v, A, G), G None where only A is kept."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        D = heads * width
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.metric = Metric(heads, width)
        self.ffn = Gated(D, D * 8 // 3)
        self.norm1, self.norm2 = nn.LayerNorm(D, eps=1e-6), nn.LayerNorm(D, eps=1e-6)

    def forward(self, x, held=None, keep_operator=False):
        B, T, D = x.shape
        start = 0 if held is None else held[0].shape[2]
        positions = torch.arange(start, start + T, dtype=torch.float32)
        q, k, v = (part(x).view(B, T, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        q, k = rotate(q, positions), rotate(k, positions)
        if held is None:
            A = self.metric.metric(q)
            G = self.metric.operator(A)
        else:
            k, v = torch.cat([held[0], k], dim=2), torch.cat([held[1], v], dim=2)
            A, G = held[2:]
            G = self.metric.operator(A) if G is None else G
        scores = (q @ G) @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if T > 1:
            scores = scores + torch.full((T, T), -1e9).triu(1)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)
        x = self.norm1(self.out(mixed) + x)
        return self.norm2(self.ffn(x) + x), (k, v, A, G if keep_operator else None)


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, vocabulary: int, layers: int, heads: int, width: int):
        super().__init__()
        D = heads * width
        self.embedding = nn.Embedding(vocabulary, D)
        self.norm = nn.LayerNorm(D, eps=1e-6)
        self.layers = nn.ModuleList(Layer(heads, width) for _ in range(layers))
        self.head = nn.Linear(D, vocabulary)

    def forward(self, tokens, held=None, keep_operator=False, last_only=False):
        x = self.norm(self.embedding(tokens) * self.embedding.embedding_dim**0.5)
        kept = []
        for index, layer in enumerate(self.layers):
            x, new = layer(x, None if held is None else held[index], keep_operator)
            kept.append(new)
        return self.head(x[:, -1:] if last_only else x), kept


def measure(model: Model, length: int, batch: int, vocabulary: int) -> dict[str, harness.Timing]:
    """Seconds of each kind of token and of a training step."""
    tokens = torch.randint(1, vocabulary, (1, length))
    with torch.inference_mode():
        tasks = {"none": lambda: model(tokens, last_only=True)[0].argmax(-1)}
        for name, keep in (("kv", False), ("kv_g", True)):
            state = [tokens[:, -1:], model(tokens[:, :-1], keep_operator=keep)[1]]

            def step(state=state, keep=keep):
                logits, state[1] = model(state[0], state[1], keep)
                state[0] = logits[:, -1:].argmax(-1)

            tasks[name] = step
        for task in tasks.values():
            task()
        few = {"none": tasks.pop("none")}
        timings = harness.interleave(tasks, rounds=20) | harness.interleave(few, rounds=4)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    rows = torch.randint(1, vocabulary, (batch, length + 1))

    def train():
        logits, _ = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    train()
    return timings | harness.interleave({"train_float32": train}, rounds=3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=SIZES, default="110m")
    parser.add_argument("--threads", default="all")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    # The cores were bound before torch was imported only if the parent bound them: say how many threads to use again.
    torch.set_num_threads(harness.use_threads(options.threads))
    torch.manual_seed(0)
    sizes = SIZES[options.preset]
    timings = measure(Model(*sizes), options.length, options.batch, sizes[0])
    print(json.dumps({name: dataclasses.asdict(timing) for name, timing in timings.items()}))


if __name__ == "__main__":
    main()
