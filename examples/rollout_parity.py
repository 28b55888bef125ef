"""One program trains a small policy, another one samples from it: how far are their log-probabilities apart, and where?

The trainer is under a policy of mezzo's. The engine is plain PyTorch in 16 bits, in a process of its own: it loads what
``mezzo.weights.export`` gives, draws tokens one by one, and returns them with the log-probabilities it drew them by.

    python examples/rollout_parity.py
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

# Some cloud machines claim AMX and cannot run it; plain PyTorch would die of its first product in BF16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import nn
from torch.nn import functional

WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 4, 2
PROMPT, CONTEXT, NUM_ROLLOUTS = 16, 48, 64  # bytes, bytes, texts

#: What is compared: the trainer's policy, and the format of the engine.
PAIRS = {
    "O1,bf16": "bfloat16",
    "O2,bf16": "bfloat16",
    "O2,bf16,fp32_module=head": "bfloat16",
    "O3,bf16": "bfloat16",
    "O2,fp16": "float16",
    "O2,fp16,fp32_module=head": "float16",
    "O3,fp16": "float16",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # (batch, bytes, width)
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, NUM_HEADS, WIDTH // NUM_HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, bytes, head_dim)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):  # whose head has the weight of the embedding
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for module in (self.embed, self.position):
            nn.init.normal_(module.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, text):  # (batch, bytes) → (batch, bytes, 256)
        x = self.embed(text) + self.position.weight[: text.shape[1]]
        x = self.norm(self.blocks(x.to(self.norm.weight.dtype)))
        return self.head(x.to(self.head.weight.dtype))  # an engine may have the head in FP32


def log_probs(logits, tokens):
    return functional.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]


# The engine: plain PyTorch ------------------------------------------------------------------------------------


def engine_of(weights, dtype):
    """Return the model in 16 bits; weights that were exported in FP32 stay so."""
    model = ByteGPT().to(dtype).eval()
    if weights["head.weight"].dtype == torch.float32:
        model.head.float()  # the embedding with it, whose weight it is
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def sample(model, prompts, seed):
    """Draw tokens one by one, and return the texts with the log-probabilities that each was drawn by."""
    generator, texts, drawn_by = torch.Generator().manual_seed(seed), prompts, []
    while texts.shape[1] < CONTEXT:
        logits = model(texts)[:, -1]
        token = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        drawn_by.append(log_probs(logits[:, None], token))
        texts = torch.cat([texts, token], 1)
    return texts, torch.cat(drawn_by, 1)


def run_engine(folder):
    """What the other program does: files in, files out."""
    request = torch.load(folder / "request.pt")
    model = engine_of(request["weights"], getattr(torch, request["dtype"]))
    torch.save(sample(model, request["prompts"], request["seed"]), folder / "rollouts.pt")


# The trainer --------------------------------------------------------------------------------------------------


def train(seed, steps):
    """Train under O2, and return the model, plain again: FP32, bit by bit."""
    import mezzo

    torch.manual_seed(seed)
    text = torch.tensor(list("".join(map(topics.get, sorted(topics))).encode()))
    model = ByteGPT()
    optimizer = mezzo.optim.AdamW(model.parameters(), lr=4e-3)
    amp = mezzo.MixedPrecision(model, optimizer, "O2,bf16", max_grad_norm=1.0)
    for _ in range(steps):
        windows = text[torch.randint(len(text) - CONTEXT, (16, 1)) + torch.arange(CONTEXT)]
        with amp.autocast():
            loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        amp.backward(loss)
        amp.step()
        optimizer.zero_grad()
    print(f"loss after {steps} steps: {loss.item():.3f}")
    amp.close()
    prompts = text[torch.randint(len(text) - PROMPT, (NUM_ROLLOUTS, 1)) + torch.arange(PROMPT)]
    return model.eval(), prompts


def roll_out(trainer, prompts, dtype, seed):
    """Hand the weights to the other program, and return what it has drawn."""
    import mezzo

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = mezzo.weights.export(trainer, dtype)
        torch.save({"weights": weights, "dtype": dtype, "prompts": prompts, "seed": seed}, folder / "request.pt")
        subprocess.run([sys.executable, __file__, "--engine", name], check=True)
        return torch.load(folder / "rollouts.pt")


@torch.no_grad()
def compare(model, prompts, policy, dtype, seed=0):
    """Roll out; return the texts, what the tokens were drawn by, and what a trainer under a policy says of them."""
    import mezzo

    trainer = copy.deepcopy(model)
    prepared = mezzo.prepare(trainer, policy)
    texts, drawn_by = roll_out(trainer, prompts, dtype, seed)
    with prepared.autocast():
        logits = trainer(texts[:, :-1])
    return texts, drawn_by, log_probs(logits, texts[:, 1:])[:, PROMPT - 1 :]


def main():
    parser = argparse.ArgumentParser(description="Compare a policy that trains with an engine that samples from it.")
    parser.add_argument("--engine", type=Path, help="be the engine: sample what a request in this folder asks for")
    parser.add_argument("--all", action="store_true", help="all pairs of policy and format, a process for each")
    args = parser.parse_args()
    if args.engine is not None:
        run_engine(args.engine)
        return

    import mezzo

    model, prompts = train(seed=0, steps=60)
    pairs = PAIRS if args.all else dict([*PAIRS.items()][1:3])
    for policy, dtype in pairs.items():
        texts, drawn_by, trained_by = compare(model, prompts, policy, dtype)
        apart = mezzo.numerics.LogProbs.of(trained_by, drawn_by)
        high = f"95 % of ratios below {apart.ratio[2]:.4f}"
        print(f"{policy:25} {apart.mean:.2e} apart, {apart.largest:.2e} at most, KL {apart.kl:.1e}, {high}")

    engine = engine_of(mezzo.weights.export(model), torch.bfloat16)
    print(mezzo.numerics.parity(model, engine, texts[:, :-1], policy_a="O1,bf16", tokens=texts[:, 1:]))


if __name__ == "__main__":
    main()
