"""The GPT against an implementation of its own that shares no code with it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from zeroexp.config.sections import ModelConfig
from zeroexp.errors import ConfigError, ModelError
from zeroexp.models.build import build
from zeroexp.models.loss import IGNORED, next_token_loss

Array = npt.NDArray[np.float64]

SMALL = {"vocab_size": 31, "dim": 24, "layers": 2, "heads": 4, "max_seq_len": 16}
SHAPES: dict[str, dict[str, object]] = {
    "llama": {"kv_heads": 2, "activation": "swiglu", "hidden": 40, "tied": False},
    "one_kv_head": {"kv_heads": 1},
    "gpt2": {"norm": "layernorm", "positions": "learned", "bias": True},
    "tied_rms_learned": {"positions": "learned"},
    "layernorm_without_bias": {"norm": "layernorm", "activation": "swiglu"},
}


def make(shape: str, **more: object) -> nn.Module:
    model = ModelConfig(**{**SMALL, **SHAPES[shape], **more})  # type: ignore[arg-type]
    module = build(model, seed=3).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # weights far from the initial ones, so that every norm and bias matters
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def plain_gpt(module: nn.Module, config: ModelConfig, tokens: list[int]) -> Array:
    """Logits (L, V) of one sequence: loops over positions and heads in numpy, fp64."""
    w = {name: p.detach().numpy() for name, p in module.named_parameters()}

    def linear(name: str, x: Array) -> Array:
        y: Array = w[f"{name}.weight"] @ x
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(name: str, x: Array) -> Array:
        if config.norm == "rmsnorm":
            scaled: Array = x / math.sqrt(float((x * x).mean()) + 1e-5) * w[f"{name}.weight"]
            return scaled
        x = x - x.mean()
        y: Array = x / math.sqrt(float((x * x).mean()) + 1e-5) * w[f"{name}.weight"]
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def turn(x: Array, position: int) -> Array:
        half = len(x) // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position / 10000 ** (2 * i / len(x))
            # a complex number per pair, multiplied by exp(i * angle)
            z = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = z.real, z.imag
        return out

    kv_heads = config.kv_heads or config.heads
    width = config.dim // config.heads
    xs = [w["embedding.weight"][t].copy() for t in tokens]
    if config.positions == "learned":
        xs = [x + w["positions.weight"][i] for i, x in enumerate(xs)]
    for layer in range(config.layers):
        b = f"blocks.{layer}"
        normed = [norm(f"{b}.attention_norm", x) for x in xs]
        q, k, v = (
            [linear(f"{b}.attention.{n}", x).reshape(-1, width) for x in normed] for n in "qkv"
        )
        if config.positions == "rotary":
            q = [np.stack([turn(h, i) for h in heads]) for i, heads in enumerate(q)]
            k = [np.stack([turn(h, i) for h in heads]) for i, heads in enumerate(k)]
        for i in range(len(tokens)):
            mixed = []
            for head in range(config.heads):
                shared = head * kv_heads // config.heads
                scores = np.array(
                    [q[i][head] @ k[j][shared] / math.sqrt(width) for j in range(i + 1)]
                )
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed.append(weights @ np.stack([v[j][shared] for j in range(i + 1)]))
            xs[i] = xs[i] + linear(f"{b}.attention.out", np.concatenate(mixed))
        for i, x in enumerate(xs):
            h = norm(f"{b}.mlp_norm", x)
            up = linear(f"{b}.mlp.up", h)
            if config.activation == "swiglu":
                gate = linear(f"{b}.mlp.gate", h)
                act = gate / (1 + np.exp(-gate)) * up
            else:
                act = np.array([0.5 * u * (1 + math.erf(u / math.sqrt(2))) for u in up])
            xs[i] = x + linear(f"{b}.mlp.down", act)
    table = w["embedding.weight"] if config.tied else w["head.weight"]
    return np.stack([table @ norm("norm", x) for x in xs])


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_a_plain_implementation(shape: str) -> None:
    config = ModelConfig(**{**SMALL, **SHAPES[shape]})  # type: ignore[arg-type]
    module = make(shape)
    tokens = torch.randint(0, 31, (3, 11), generator=torch.Generator().manual_seed(1))
    logits = module(tokens).detach().numpy()
    for row in range(3):
        expected = plain_gpt(module, config, tokens[row].tolist())
        np.testing.assert_allclose(logits[row], expected, rtol=0, atol=1e-10 * abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_equals_the_slope_of_the_loss(shape: str) -> None:
    module = make(shape)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 31, (2, 9), generator=generator)
    targets = torch.randint(0, 31, (2, 9), generator=generator)
    module(tokens, targets).backward()
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        h = 1e-5
        with torch.no_grad():
            p.add_(direction, alpha=h)
            above = float(module(tokens, targets))
            p.sub_(direction, alpha=2 * h)
            below = float(module(tokens, targets))
            p.add_(direction, alpha=h)
        slope = (above - below) / (2 * h)
        assert slope == pytest.approx(float((p.grad * direction).sum()), rel=1e-5, abs=1e-8), name


def test_no_position_sees_the_future() -> None:
    module = make("llama")
    tokens = torch.randint(0, 31, (1, 12), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 31
    a, b = module(tokens), module(changed)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recompute_changes_no_bit_of_loss_or_gradients(shape: str, dropout: float) -> None:
    tokens = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(4))
    results = []
    for recompute in (False, True):
        model = ModelConfig(**{**SMALL, **SHAPES[shape], "dropout": dropout})  # type: ignore[arg-type]
        module = build(model, seed=3, recompute=recompute)
        torch.manual_seed(9)  # of the dropout
        loss = module(tokens, tokens)
        loss.backward()
        results.append([loss] + [p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recompute_keeps_only_the_inputs_of_blocks() -> None:
    """Bytes that autograd saves: with recompute, the blocks add one (B, L, C) tensor each."""
    tokens = torch.randint(0, 31, (2, 16), generator=torch.Generator().manual_seed(4))

    def saved(layers: int, recompute: bool) -> int:
        model = ModelConfig(**{**SMALL, "layers": layers})  # type: ignore[arg-type]
        module = build(model, seed=0, recompute=recompute)
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        kept: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = module(tokens, tokens)
        del loss
        return sum(kept.values())

    per_block = saved(4, True) - saved(3, True)
    assert per_block == 2 * 16 * 24 * 4  # batch x length x width x 4 bytes
    assert saved(4, False) - saved(3, False) > 10 * per_block


def test_dropout_acts_in_training_only() -> None:
    module = make("gpt2", dropout=0.5)
    tokens = torch.randint(0, 31, (1, 8), generator=torch.Generator().manual_seed(5))
    assert not torch.equal(module(tokens), module(tokens))
    module.eval()
    assert torch.equal(module(tokens), module(tokens))
    for part in module.modules():  # the same weights without dropout
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert torch.equal(module(tokens), make("gpt2").eval()(tokens))


def test_initial_weights_follow_from_the_seed_alone() -> None:
    model = ModelConfig(**SMALL)  # type: ignore[arg-type]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build(model, seed=7)
    assert torch.equal(torch.get_rng_state(), before), "later draws must not depend on the model"
    torch.manual_seed(2)
    two, other = build(model, seed=7), build(model, seed=8)
    pairs = zip(one.parameters(), two.parameters(), other.parameters(), strict=True)
    for a, b, c in pairs:
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c)


def test_initial_scale_is_that_of_gpt2() -> None:
    """N(0, 0.02^2); projections into the residual stream are smaller by sqrt(2 x layers)."""
    model = ModelConfig(vocab_size=256, dim=256, layers=8, heads=4, tied=False)
    for name, p in build(model, seed=0).named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        expected = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
        assert float(p.detach().std()) == pytest.approx(expected, rel=0.02), name
        assert abs(float(p.detach().mean())) < 5 * expected / math.sqrt(p.numel()), name


def test_reset_parameters_repeats_the_constructor() -> None:
    """Deferred initialisation: materialise the parts in order and reset each.

    Untied, for torch's to_empty gives each name of a tied parameter storage of its own.
    """
    sizes = {**SMALL, **SHAPES["gpt2"], "tied": False}
    model = ModelConfig(**sizes)  # type: ignore[arg-type]
    expected = build(model, seed=7)
    with torch.device("meta"):
        late = build(model, seed=0)
    late.to_empty(device="cpu")
    torch.manual_seed(7)
    for part in late.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset) and list(part.parameters(recurse=False)):
            reset()
    for (name, a), b in zip(late.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_has_no_buffers_to_lose() -> None:
    assert not list(make("llama").buffers())


def test_bf16_runs_and_its_loss_is_fp32() -> None:
    model = ModelConfig(**{**SMALL, **SHAPES["llama"]})  # type: ignore[arg-type]
    tokens = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(6))
    exact = build(model, seed=1)(tokens, tokens)
    loss = build(model, seed=1).bfloat16()(tokens, tokens)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)


def test_loss_is_the_mean_over_the_targets_that_count() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[1, IGNORED, 4], [IGNORED, 0, IGNORED]])
    expected = 0.0
    for b, i in ((0, 0), (0, 2), (1, 1)):
        row = logits[b, i].tolist()
        expected += math.log(sum(math.exp(x) for x in row)) - row[int(targets[b, i])]
    assert float(next_token_loss(logits, targets)) == pytest.approx(expected / 3, rel=1e-12)
    assert float(next_token_loss(logits, torch.full((2, 3), IGNORED))) == 0.0


def test_too_long_a_sequence_is_refused_with_the_keys_to_change() -> None:
    with pytest.raises(ModelError, match=r"17 tokens.* 16 .*model\.max_seq_len.*data\.seq_len"):
        make("gpt2")(torch.zeros(1, 17, dtype=torch.int64))
    assert make("llama")(torch.zeros(1, 17, dtype=torch.int64)).shape == (1, 17, 31)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 24, "heads": 5}, r"model\.heads .*5 does not divide model\.dim=24"),
        ({"dim": 20, "heads": 4}, r"model\.positions .*a head is 5 wide"),
        ({"dim": 24, "heads": 4, "kv_heads": 3}, r"model\.kv_heads .*3 does not divide"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelConfig(**sizes), seed=0)  # type: ignore[arg-type]


def test_a_model_that_is_not_built_in_is_refused() -> None:
    with pytest.raises(ModelError, match="external is not built in"):
        build(ModelConfig(kind="external"), seed=0)


def test_layers_that_ran_in_inference_mode_can_be_trained() -> None:
    """Lightning validates in inference mode before the first step."""
    layers = [layer for _, layer in make("llama").pipeline_layers()]  # type: ignore[operator]
    tokens = torch.zeros(1, 4, dtype=torch.long)
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            value = tokens
            for layer in layers:
                value = layer(value)
    value.sum().backward()
