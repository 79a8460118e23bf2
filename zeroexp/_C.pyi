"""The compiled ops (csrc/module.cpp). Arguments are addresses; only zeroexp.ops calls these."""

from collections.abc import Sequence

from typing_extensions import Buffer

def available_isas() -> list[str]: ...

class Kernels:
    def __init__(self, isa: str = ...) -> None: ...
    @property
    def isa(self) -> str: ...
    def adam(
        self,
        *,
        param: int,
        grad: int,
        exp_avg: int,
        exp_avg_sq: int,
        copy: int,
        size: int,
        grad_type: str,
        copy_type: str,
        l2: bool,
        grad_scale: float,
        decay: float,
        weight_decay: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        bias2_sqrt: float,
        eps: float,
        neg_step_size: float,
        threads: int,
    ) -> None: ...
    def sgd(
        self,
        *,
        param: int,
        grad: int,
        momentum_buffer: int,
        copy: int,
        size: int,
        grad_type: str,
        copy_type: str,
        grad_scale: float,
        weight_decay: float,
        momentum: float,
        one_minus_dampening: float,
        neg_lr: float,
        first: bool,
        nesterov: bool,
        threads: int,
    ) -> None: ...
    def adagrad(
        self,
        *,
        param: int,
        grad: int,
        sum: int,
        copy: int,
        size: int,
        grad_type: str,
        copy_type: str,
        grad_scale: float,
        weight_decay: float,
        eps: float,
        neg_step_size: float,
        threads: int,
    ) -> None: ...
    def lion(
        self,
        *,
        param: int,
        grad: int,
        exp_avg: int,
        copy: int,
        size: int,
        grad_type: str,
        copy_type: str,
        grad_scale: float,
        decay: float,
        beta1: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        neg_lr: float,
        threads: int,
    ) -> None: ...
    def adam_traffic(
        self, *, param: int, grad: int, exp_avg: int, exp_avg_sq: int, size: int, threads: int
    ) -> None: ...
    def sum_squares(self, *, data: int, size: int, type: str, threads: int) -> float: ...
    def sum_into(
        self, *, out: int, parts: Sequence[int], size: int, type: str, threads: int
    ) -> None: ...
    def divide_into(
        self, *, out: int, part: int, divisor: float, size: int, type: str, add: bool, threads: int
    ) -> None: ...
    def scale_cast(
        self,
        *,
        out: int,
        part: int,
        scale: float,
        size: int,
        part_type: str,
        out_type: str,
        threads: int,
    ) -> float: ...
    def adopt_edits(
        self, *, master: int, low: int, size: int, low_type: str, threads: int
    ) -> bool: ...
    def checksum(self, *, address: int, num_bytes: int, seed: int) -> int: ...

class FileOutcome:
    @property
    def error(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def wanted(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def ended(self) -> float: ...

class FileFacts:
    @property
    def size(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def why_buffered(self) -> str: ...

class FileEngine:
    def __init__(self, *, kind: str, queue_depth: int, block_size: int, threads: int) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...
    def open(self, path: str, access: str, num_bytes: int) -> tuple[int, FileOutcome]: ...
    def facts(self, file: int) -> FileFacts: ...
    def sync(self, file: int) -> FileOutcome: ...
    def close_file(self, file: int) -> None: ...
    def submit(
        self, *, file: int, write: bool, address: int, num_bytes: int, offset: int
    ) -> int: ...
    def over(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> FileOutcome: ...
    def shut_down(self) -> None: ...

class HostRange(Buffer):
    def __init__(self, num_bytes: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def huge_pages(self) -> bool: ...
    @property
    def resident_bytes(self) -> int: ...
    def release(self) -> None: ...
    def take_pages(self, source: HostRange) -> None: ...
