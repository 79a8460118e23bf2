"""Small decoders of transformers from their configurations, whole and in a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from small import rank, settings, world
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.models.decoder import as_pipeline
from zeroexp.pipe_engine import PipeEngine
from zeroexp.pipeline.runtime.tree import flatten, unflatten

VOCAB, LENGTH, IGNORED = 61, 7, -100
WINDOW = 4
"""More than the 3 tokens of padding: a row that sees nothing else is NaN in eager fp64."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "final_logit_softcapping": 0.5},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmo2": {},
    "phi3": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "mixtral": {"num_local_experts": 4, "experts_implementation": "eager"},
}


def decoder(family: str = "llama", *, tied: bool = False, attention: str = "sdpa") -> Any:
    """Three layers of 4 heads on 2 key-value heads in fp64, every weight drawn."""
    # Not at the top: a rank of the pool imports a lab for each of its tests, transformers for few.
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "tie_word_embeddings": tied,
            **FAMILIES[family],
        },
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    return model


def with_exact_norms(model: Any) -> Any:
    """The norms of transformers round to fp32 on the way; torch's compute in fp64."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if hasattr(norm, "variance_epsilon"):
                exact = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(module, name, exact)
    return model


def batch_of(samples: int, seed: int, *, padded: bool = False) -> dict[str, Tensor]:
    """Tokens; with ``padded``, 1 and 3 of each two samples' last ones are padding."""
    drawn = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(1, VOCAB, (samples, LENGTH), generator=drawn)}
    if padded:
        kept = torch.tensor([LENGTH - 1, LENGTH - 3] * (samples // 2))
        batch["attention_mask"] = (torch.arange(LENGTH) < kept[:, None]).long()
    return batch


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    mask = batch.get("attention_mask")
    return batch["input_ids"] if mask is None else batch["input_ids"].where(mask > 0, IGNORED)


def shifted_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    scored, wanted = logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten()
    return F.cross_entropy(scored, wanted, ignore_index=IGNORED)


def along_the_chain(model: Any, batch: Any) -> Tensor:
    """Through all layers, each output as it crosses to another stage."""
    value = batch
    for _, layer in as_pipeline(model).pipeline_layers():
        value = unflatten(*flatten(layer(value)))
    return value


def grads(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def differences(model: Any, batch: dict[str, Tensor]) -> tuple[float, float]:
    """The most by which logits, and gradients of a loss, of chain and decoder differ."""
    labels = labels_of(batch)
    whole = model(**batch, use_cache=False).logits
    shifted_loss(whole, labels).backward()
    wanted = grads(model)
    chained = along_the_chain(model, batch)
    shifted_loss(chained, labels).backward()
    found = grads(model)
    assert found.keys() == wanted.keys() and len(found) == len(list(model.parameters()))
    apart = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    return float((whole - chained).detach().abs().max()), apart


@dataclass(frozen=True)
class Case:
    schedule: str
    stage: int
    tied: bool
    padded: bool
    family: str = "llama"
    attention: str = "sdpa"
    checkpointing: str = ""
    micro_batches: int = 2
    steps: int = 5
    lr: float = 0.1

    def build(self) -> Any:
        return with_exact_norms(decoder(self.family, tied=self.tied, attention=self.attention))

    def batches(self, data_ranks: int) -> list[dict[str, Tensor]]:
        samples = 2 * self.micro_batches * data_ranks
        return [batch_of(samples, seed, padded=self.padded) for seed in range(self.steps)]


def train(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """In a pipe of two stages; losses, and on rank 0 the weights."""
    inner = case.build()
    if case.checkpointing:
        reentrant = case.checkpointing == "reentrant"
        inner.gradient_checkpointing_enable({"use_reentrant": reentrant})
    config = {
        **settings(case.stage),
        "pipeline": {
            "schedule": case.schedule,
            "stages": 2,
            "micro_batches": case.micro_batches,
            "cut": "layers",
        },
    }
    optimizer = torch.optim.SGD(inner.parameters(), lr=case.lr)
    engine = PipeEngine(as_pipeline(inner), optimizer, config, loss=shifted_loss)
    data_ranks = world() // 2
    losses = []
    for batch in case.batches(data_ranks):
        mine = {k: v.chunk(data_ranks)[rank() % data_ranks] for k, v in batch.items()}
        losses.append(engine.train_batch(mine, labels_of(mine)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return losses, {n: state[n] for n, _ in inner.named_parameters()} if rank() == 0 else {}


def reference(case: Case, data_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """The decoder alone, on the whole batches."""
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    losses = []
    for batch in case.batches(data_ranks):
        loss = shifted_loss(model(**batch, use_cache=False).logits, labels_of(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def both(case: Case) -> tuple[Any, Any]:
    """In the pipe, and alone on the same rank: (losses, weights) of each."""
    return train(case), reference(case, world() // 2)


def small_case() -> tuple[tuple[float, float], Any, Any]:
    """The chain's differences, and a training both ways, in one visit of two ranks; and the code of
    the documentation runs."""
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    exec(page.split("```py\n")[1].split("```")[0], {})
    apart = differences(decoder(tied=True, attention="eager"), batch_of(4, 0, padded=True))
    return apart, *both(Case("zb_h1", 3, tied=True, padded=True))
