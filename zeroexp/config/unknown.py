"""Keys and values that do not exist: where the user probably wanted to go."""

from __future__ import annotations

from typing import Any

from zeroexp.config.later import arrives_with
from zeroexp.config.nearest import nearest
from zeroexp.config.setting import Key
from zeroexp.config.tree import KEYS, SECTIONS, option_key
from zeroexp.config.value import plain, show
from zeroexp.errors import Problem

# Names that users bring from other systems, lower case: the last parts of a dotted key.
FOREIGN = {
    "train_batch_size": "data.batch_size",
    "global_batch_size": "data.batch_size",
    "train_micro_batch_size_per_gpu": "data.micro_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "gradient_clipping": "trainer.gradient_clip_val",
    "max_grad_norm": "trainer.gradient_clip_val",
    "grad_clip": "trainer.gradient_clip_val",
    "learning_rate": "optim.lr",
    "num_workers": "data.workers",
    "num_epochs": "trainer.max_epochs",
    "num_train_epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "world_size": "trainer.devices",
    "nproc_per_node": "trainer.devices",
    "nnodes": "trainer.num_nodes",
    "val_check_interval": "trainer.val_every",
    "limit_val_batches": "trainer.val_batches",
    "log_every_n_steps": "trainer.log_every",
    "reduce_bucket_size": "zero.bucket",
    "overlap_comm": "zero.overlap",
    "initial_scale_power": "precision.loss_scale.init",
    "loss_scale_window": "precision.loss_scale.interval",
    "min_loss_scale": "precision.loss_scale.floor",
    "cpu_offload": "offload.kind",
    "pipeline.kind": "pipeline.schedule",
    "pipeline_parallel_size": "pipeline.stages",
    "pipeline_model_parallel_size": "pipeline.stages",
    "pipeline_parallel_degree": "pipeline.stages",
    "pp_size": "pipeline.stages",
    "num_stages": "pipeline.stages",
    "num_micro_batches": "pipeline.micro_batches",
    "n_microbatches": "pipeline.micro_batches",
    "num_model_chunks": "pipeline.virtual",
    "virtual_pipeline_model_parallel_size": "pipeline.virtual",
    "partition_method": "pipeline.cut",
    "offload.device": "offload.kind",
    "offload_optimizer": "offload.optim",
    "offload_optimizer.device": "offload.optim",
    "offload_optimizer_device": "offload.optim",
    "offload_param": "offload.params",
    "offload_parameters": "offload.params",
    "offload_param.device": "offload.params",
    "offload_params_device": "offload.params",
    "remote_device": "offload.params",
    "ratio": "offload.fraction",
    "buffer_size": "offload.chunk",
    "super_offload": "offload.step_in_backward",
    "delayed_param_update": "offload.delayed_update",
    "nvme_path": "offload.nvme.dir",
    "offload.path": "offload.nvme.dir",
    "nvme.path": "offload.nvme.dir",
    "aio.block_size": "offload.nvme.block_size",
    "aio.queue_depth": "offload.nvme.queue_depth",
    "intra_op_parallelism": "offload.nvme.threads",
    "thread_count": "offload.nvme.threads",
    "n_layer": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_head": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "n_embd": "model.dim",
    "hidden_size": "model.dim",
    "d_model": "model.dim",
    "intermediate_size": "model.hidden",
    "block_size": "data.seq_len",
    "sequence_length": "data.seq_len",
    "output_dir": "paths.runs",
    "resume_from_checkpoint": "checkpoint.resume",
    "ckpt_path": "checkpoint.resume",
}

# What needs no key here.
_BY_ITSELF = {
    "pin_memory": "Host buffers are pinned wherever there is an accelerator.",
    "buffer_count": "The ring of chunks is sized from offload.chunk.",
    "pipeline_read": "Reads, steps and writes always overlap.",
    "pipeline_write": "Reads, steps and writes always overlap.",
    "overlap_events": "Reads, steps and writes always overlap.",
    "single_submit": "offload.nvme.queue_depth says how many blocks go to the kernel at once.",
}

# Sections inside of sections, and what others call them.
_FOREIGN_SECTIONS = {"aio": "nvme"}
_NESTED = sorted({key.section for key in KEYS.values() if "." in key.section})


def unknown_key(path: str) -> Problem:
    """The problem of a key that does not exist, with the nearest one that does."""
    section, _, rest = path.partition(".")
    capability = arrives_with(section)
    if capability is not None:
        only = (
            f"Only {section}=none exists in this version."
            if section in SECTIONS
            else "It is not in this version."
        )
        return Problem(path, f"arrives with {capability}.", only)
    if path in SECTIONS or not rest or section in SECTIONS:
        problem = "no such key."
    else:
        problem = f"no such section as {section}."
    return Problem(path, problem, suggestion(path))


def suggestion(path: str) -> str:
    """``Did you mean …?`` for a key that does not exist; a pointer to the list where nothing is "
    "near."""
    name = path.rpartition(".")[2].lower()
    if name in _BY_ITSELF:
        return _BY_ITSELF[name]
    for section in _NESTED:
        if _FOREIGN_SECTIONS.get(name, name) == section.rpartition(".")[2]:
            names = ", ".join(key.rpartition(".")[2] for key in _below(section))
            return f"Did you mean  {section}  (a section: {names})?"
    keys = candidates(path)
    if not keys:
        return "docs/configuration.md lists every key."
    if len(keys) == 1:
        return f"Did you mean  {described(KEYS[keys[0]])}?"
    return f"Did you mean one of  {', '.join(keys)}?"


def described(key: Key) -> str:
    """``zero.stage  (ZeRO stage 0-3, default 1)``."""
    return f"{key.path}  ({key.meta.phrase}, default {show(plain(key.default), key)})"


def candidates(path: str) -> list[str]:
    """Existing keys that ``path`` may stand for, at most three, the best first."""
    head, _, name = path.rpartition(".")
    name = name or path
    parent = head.rpartition(".")[2]
    # Nested keys in the wrong section, or without the last one they are in.
    strayed = [key for key in _below(head) if key.rpartition(".")[2] == name] if head else []
    strayed += [f"{s}.{name}" for s in _NESTED if s.rpartition(".")[2] == parent]
    for key in strayed:
        if key in KEYS:
            return [key]
    for known in (f"{parent}.{name}".lower(), name.lower()):
        if known in FOREIGN:
            return [FOREIGN[known]]
    section, _, rest = path.partition(".")
    if rest and section not in SECTIONS:
        corrected = [f"{near}.{rest}" for near in nearest(section, SECTIONS, 3)]
        found = [c for c in corrected if c in KEYS]
        if not found:
            found = [n for c in corrected for n in nearest(c, _below(c.partition(".")[0]))][:1]
        if found:
            return found[:1]
    elif not rest:
        near = nearest(section, SECTIONS)
        if near and option_key(near[0]) in KEYS:
            return [option_key(near[0])]
    inside = [key for key in _below(head) if key != head] if head else []
    close = nearest(path, inside) if nearest(name, [k.rpartition(".")[2] for k in inside]) else []
    elsewhere = [key for key in KEYS if key.rpartition(".")[2] == name]
    if elsewhere:
        return elsewhere[:3]
    if close:
        return close
    top = nearest(name, [key.rpartition(".")[2] for key in KEYS])
    return [key for key in KEYS if top and key.rpartition(".")[2] == top[0]][:3] or nearest(
        path, KEYS
    )


def _below(section: str) -> list[str]:
    return [key for key in KEYS if key.startswith(f"{section}.")]


def later_value(key: Key, value: Any) -> Problem | None:
    """The problem of a value that is planned but not here, or None."""
    if key.name != "kind":
        return None
    capability = arrives_with(key.section, value)
    if capability is None or value is None:
        return None
    choices = ", ".join(key.meta.choices)
    exist = (
        f"Only {choices} exists in this version"
        if len(key.meta.choices) == 1
        else f"Here now: {choices}"
    )
    return Problem(key.path, f"{show(value)} arrives with {capability}.", f"{exist}.")
