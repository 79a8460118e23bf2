from __future__ import annotations

import pytest
import torch

from zeroexp import ops

M = (1 << 64) - 1


def expected(data: bytes, seed: int = 0) -> int:
    """The definition in whole numbers: lanes mixed with their position, summed modulo 2**64."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M
        x = (x ^ x >> 27) * 0x94D049BB133111EB & M
        return x ^ x >> 31

    total = mix(len(data) ^ seed)
    for lane in range((len(data) + 7) // 8):
        value = int.from_bytes(data[lane * 8 : lane * 8 + 8], "little")
        total += mix(value ^ (seed + (lane + 1) * 0x9E3779B97F4A7C15 & M))
    return total & M


def test_the_mixing_is_splitmix64s() -> None:
    """The first numbers of its sequence from 0, as published with xoshiro's seeding: the sum of
    nothing is the mixed seed, so lanes of zeros add them up."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert expected(b"") == 0
    for count in range(4):
        length = expected(bytes(count * 8)) - sum(first[:count]) & M
        assert length == expected(b"", seed=count * 8)


def random_bytes(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 1000, 70_001])
@pytest.mark.parametrize("seed", [0, 5, M])
def test_checksum_is_its_definition(isa: str, size: int, seed: int) -> None:
    data = random_bytes(size)
    assert ops.checksum(data, seed=seed) == expected(bytes(data.tolist()), seed)


def test_every_tail_and_every_start(isa: str) -> None:
    """Around the width of every vector, from addresses that no vector likes."""
    data = random_bytes(300)
    for size in (*range(0, 140), 255, 257):
        start = size % 9
        part = data[start : start + size]
        assert ops.checksum(part, seed=size) == expected(bytes(part.tolist()), size)


def test_blocks_of_the_reference_join(isa: str) -> None:
    data = random_bytes((1 << 23) + 13)
    assert ops.checksum(data) == expected(data.numpy().tobytes())


def test_only_bytes_count(isa: str) -> None:
    data = random_bytes(4096)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        assert ops.checksum(data.view(dtype).view(2, -1)) == ops.checksum(data)
    assert ops.checksum(torch.tensor(1.5)) == expected(b"\x00\x00\xc0\x3f")
    assert ops.checksum(data[3:100]) == expected(bytes(data[3:100].tolist()))


def test_every_change_is_seen(isa: str) -> None:
    data = random_bytes(200)
    good = ops.checksum(data)
    for at in range(200):
        for bit in (1, 16, 128):
            data[at] ^= bit
            assert ops.checksum(data) != good
            data[at] ^= bit
        assert ops.checksum(data[:at]) != good
    assert ops.checksum(data.view(torch.int64).roll(1)) != good
    assert ops.checksum(torch.zeros(64)) != ops.checksum(torch.zeros(65))
    assert ops.checksum(data) == good


@pytest.mark.parametrize("bit", [0, 15, 31, 32, 47, 60, 61, 62, 63])
def test_the_same_bit_of_several_lanes_does_not_cancel_out(isa: str, bit: int) -> None:
    """A failing line flips one bit of many lanes; the signs of fp32 are bits 31 and 63."""
    data = torch.arange(256, dtype=torch.int64)
    good = ops.checksum(data)
    flip = torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    for other in range(1, 256):
        for lanes in ([0, other], [other, (other * 7 + 1) % 256, (other * 5 + 3) % 256]):
            bad = data.clone()
            bad[lanes] ^= flip
            assert ops.checksum(bad) != good


def test_what_has_no_sum_is_refused(isa: str) -> None:
    with pytest.raises(TypeError, match=r"t is torch\.strided on meta"):
        ops.checksum(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match=r"shape \(5, 2\) is not contiguous"):
        ops.checksum(torch.zeros(2, 5).t())
    with pytest.raises(ValueError, match="seed is -1"):
        ops.checksum(torch.zeros(3), seed=-1)
