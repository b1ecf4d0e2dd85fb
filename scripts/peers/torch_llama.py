"""A Llama as a careful PyTorch user would write it for one GPU: the hardest peer of scripts/bench_gpu.py.

torch.compile over the whole stack, one product for q, k, v and one for gate and up, SDPA (causal, grouped heads), bfloat16
by autocast over float32 parameters, a cross-entropy that holds the logits of one chunk of tokens at a time and takes its
gradients on the way forward, fused AdamW, gradients clipped. It attends over whole rows: no documents.

Legend: B batch, T tokens, D model, N query heads, K key-value heads, H head dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d: int, n: int, k: int, h: int, d_ff: int, eps: float):
        super().__init__()
        self.n, self.k, self.h, self.eps = n, k, h, eps
        self.qkv = nn.Linear(d, (n + 2 * k) * h, bias=False)
        self.o = nn.Linear(n * h, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d, bias=False)
        self.attn_norm = nn.Parameter(torch.ones(d))
        self.mlp_norm = nn.Parameter(torch.ones(d))

    def forward(self, x_BxTxD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, d = x_BxTxD.shape
        y = F.rms_norm(x_BxTxD, (d,), self.attn_norm.to(x_BxTxD.dtype), self.eps)
        qkv = self.qkv(y).view(b, t, self.n + 2 * self.k, self.h)
        q, k, v = (x.transpose(1, 2) for x in qkv.split([self.n, self.k, self.k], dim=2))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n != self.k)
        x_BxTxD = x_BxTxD + self.o(y.transpose(1, 2).reshape(b, t, self.n * self.h))
        y = F.rms_norm(x_BxTxD, (d,), self.mlp_norm.to(x_BxTxD.dtype), self.eps)
        gate, up = self.gate_up(y).chunk(2, dim=-1)
        return x_BxTxD + self.down(F.silu(gate) * up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE of (B, heads, T, H) by (T, H/2) tables."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Stack(nn.Module):
    """Token ids (B, T) -> hidden states (B, T, D) after the last norm; `embed.weight` is the head too."""

    def __init__(self, m, seq_len: int):
        super().__init__()
        self.eps, self.dtype = m.norm_eps, getattr(torch, m.dtype)
        self.embed = nn.Embedding(m.padded_vocab_size, m.d_model)
        parts = (m.d_model, m.n_heads, m.n_kv_heads, m.head_dim, m.d_ff, m.norm_eps)
        self.layers = nn.ModuleList(Block(*parts) for _ in range(m.n_layers))
        self.norm = nn.Parameter(torch.ones(m.d_model))
        frequencies = m.rope.theta ** (-torch.arange(0, m.head_dim, 2) / m.head_dim)
        angles = torch.arange(seq_len)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(p, std=m.init_std)

    def forward(self, tokens_BxT: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens_BxT).to(self.dtype)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.rms_norm(x, x.shape[-1:], self.norm.to(x.dtype), self.eps)


def chunk_gradients(x_RxD, head_VxD, targets_R, vocab_size: int, count: int):
    """Sum of losses of one chunk over `count`, and its gradients by the hidden states and the head."""
    logits = (x_RxD @ head_VxD.t()).float()
    logits[:, vocab_size:] = float("-inf")
    lse = logits.logsumexp(-1)
    rows = torch.arange(len(targets_R), device=logits.device)
    loss = (lse - logits[rows, targets_R]).sum() / count
    d_logits = (logits - lse[:, None]).exp() / count
    d_logits[rows, targets_R] -= 1.0 / count
    d_logits = d_logits.to(x_RxD.dtype)
    return loss, d_logits @ head_VxD, d_logits.t() @ x_RxD


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of a linear head over chunks of tokens."""

    @staticmethod
    def forward(ctx, x_MxD, head_VxD, targets_M, vocab_size, chunk, gradients):
        head = head_VxD.to(x_MxD.dtype)
        total, d_x, d_head = 0.0, torch.empty_like(x_MxD), torch.zeros_like(head_VxD)
        for i in range(0, len(x_MxD), chunk):
            part = slice(i, i + chunk)
            loss, d_x[part], d = gradients(x_MxD[part], head, targets_M[part], vocab_size, len(x_MxD))
            total, d_head = total + loss, d_head.add_(d)
        ctx.save_for_backward(d_x, d_head)
        return total

    @staticmethod
    def backward(ctx, d_loss):
        d_x, d_head = ctx.saved_tensors
        return d_x * d_loss.to(d_x.dtype), d_head * d_loss, None, None, None, None


class Trainer:
    """The model with its optimizer; `step(tokens, targets)` queues one update and returns the loss, not waited for."""

    def __init__(self, config, device: str, *, compile_model: bool = True, chunk: int = 4096):
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        m, o = config.model, config.optim
        self.config, self.device, self.chunk = config, device, chunk
        self.model = Stack(m, config.train.seq_len).to(device)
        self.forward = torch.compile(self.model) if compile_model else self.model
        self.gradients = torch.compile(chunk_gradients) if compile_model else chunk_gradients
        settings = {"lr": o.lr, "betas": (o.b1, o.b2), "eps": o.eps, "weight_decay": o.weight_decay}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **settings)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        dtype = self.model.dtype
        with torch.autocast(self.device, dtype, enabled=dtype != torch.float32):
            x = self.forward(tokens)
        x_MxD, targets_M = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
        vocab_size = self.config.model.vocab_size
        return ChunkedLoss.apply(x_MxD, self.model.embed.weight, targets_M, vocab_size, self.chunk, self.gradients)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm or float("inf"), foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
