"""The allocator's settings: what text means, what is refused, and the sizes that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memtrain.memory.allocator_config import AllocatorConfig, TieBreak

MIB = 1 << 20
PLAIN = AllocatorConfig()


def test_requests_are_rounded_up_to_512_bytes() -> None:
    assert [PLAIN.block_bytes(size) for size in (1, 512, 513, MIB, MIB + 1)] == [512, 512, 1024, MIB, MIB + 512]


def test_requests_are_rounded_up_to_divisions_of_a_power_of_two() -> None:
    config = AllocatorConfig.of("roundup_power2_divisions:4", "2.13.0")
    # Up to 512 bytes times the divisions the plain rule holds; powers of two stay.
    sizes = (1200, 2048, 2049, 4096, 1200 * MIB, 1281 * MIB)
    assert [config.block_bytes(size) for size in sizes] == [1536, 2048, 2560, 4096, 1280 * MIB, 1536 * MIB]


def test_divisions_are_given_by_interval() -> None:
    config = AllocatorConfig.of("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "2.13.0")
    assert config.roundup_power2_divisions == (1,) * 9 + (2, 4, 8, 8, 8, 8, 8)
    # 700 MiB: halves of 512 MiB; 300 MiB + 1: one division is the plain rule.
    assert config.block_bytes(700 * MIB) == 768 * MIB
    assert config.block_bytes(300 * MIB + 1) == 300 * MIB + 512
    # The last interval has no end.
    assert config.block_bytes(70_000 * MIB) == 73_728 * MIB


def test_an_interval_that_is_not_named_keeps_the_plain_rule() -> None:
    assert (
        AllocatorConfig.of("roundup_power2_divisions:[2:4,8:2]", "2.13.0").roundup_power2_divisions == (4, 4, 0, 2) + (0,) * 12
    )


def test_segments_are_2_or_20_mib_or_as_large_as_the_block() -> None:
    sizes = (512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512, 13 * MIB)
    assert [PLAIN.segment_bytes(size) // MIB for size in sizes] == [2, 2, 20, 20, 10, 12, 14]
    assert AllocatorConfig(large_segment_bytes=32 * MIB).segment_bytes(2 * MIB) == 32 * MIB


def test_text_is_read_as_pytorch_reads_it() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:40,garbage_collection_threshold:0.6,"
        "large_segment_size_mb:32,per_process_memory_fraction:0.9,backend:native,pinned_num_register_threads:8,"
    )
    assert AllocatorConfig.of(text, "2.11.0") == AllocatorConfig(
        expandable_segments=True,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        garbage_collection_threshold=0.6,
        large_segment_bytes=32 * MIB,
        memory_fraction=0.9,
        tie_break=TieBreak.ADDRESS,
    )


def test_no_text_is_the_default() -> None:
    assert AllocatorConfig.of("", "2.13.0") == PLAIN
    assert AllocatorConfig.of("expandable_segments:False", "2.13.0") == PLAIN


@pytest.mark.parametrize(
    ("version", "tie_break"),
    [
        ("1.13.1", TieBreak.ADDRESS),
        ("2.11.0+cu130", TieBreak.ADDRESS),
        ("2.12.1", TieBreak.BLOCK),
        ("2.13.0", TieBreak.SEGMENT),
        ("2.14.0a0+4fdf77b", TieBreak.SEGMENT),
        ("3.0.0", TieBreak.SEGMENT),
    ],
)
def test_the_release_of_torch_decides_between_equal_blocks(version: str, tie_break: TieBreak) -> None:
    assert AllocatorConfig.of("", version) == replace(PLAIN, tie_break=tie_break)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:128", "^'max_split_size' is not an allocator option that is simulated: leave it out or take one of .*max_split_size_mb,"),
        ("throw_on_cudamalloc_oom:True", "^'throw_on_cudamalloc_oom' is not an allocator option that is simulated"),
        ("expandable_segments", "^'expandable_segments' is not an allocator option: write KEY:VALUE, with commas between them[.]$"),
        ("max_split_size_mb:128;x:1", "^'max_split_size_mb:128;x:1' is not an allocator option: write KEY:VALUE"),
        ("expandable_segments:yes", "^expandable_segments is 'yes', and it takes True or False: correct it or leave it out[.]$"),
        ("max_split_size_mb:1.5", "^max_split_size_mb is '1.5', and it takes a whole number of MiB, at least a large segment [(]20[)]: "),
        ("garbage_collection_threshold:half", "^garbage_collection_threshold is 'half', and it takes a number above 0 and below 1: "),
        ("roundup_power2_divisions:3", "^roundup_power2_divisions is '3', and it takes a power of two, or powers of two by MiB"),
        ("roundup_power2_divisions:[256:3]", "^roundup_power2_divisions is '.256:3.', and it takes a power of two"),
        ("roundup_power2_divisions:[300:4]", "^roundup_power2_divisions is '.300:4.', and it takes a power of two"),
        ("backend:cudaMallocAsync", "^backend is 'cudaMallocAsync', and only the native allocator is simulated: set backend:native[.]$"),
    ],
)  # fmt: skip
def test_text_that_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllocatorConfig.of(text, "2.13.0")


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^'new' is not a version of torch: give one such as 2\.13\.0\.$"):
        AllocatorConfig.of("", "new")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_split_bytes": 19 * MIB}, "^max_split_bytes is 19922944, and it is at least the size of a large segment, 20971520: raise it[.]$"),
        ({"max_non_split_rounding_bytes": 0}, "^max_non_split_rounding_bytes is 0, and it is at least the size of a large segment"),
        ({"garbage_collection_threshold": 1.0}, "^garbage_collection_threshold is 1.0, and it is a share of the allowed memory: give a number above 0 and below 1"),
        ({"roundup_power2_divisions": (4,)}, "^roundup_power2_divisions is [(]4,[)], and each of the 16 intervals takes 0 or a power of two: correct it[.]$"),
        ({"roundup_power2_divisions": (3,) * 16}, "each of the 16 intervals takes 0 or a power of two: correct it[.]$"),
        ({"large_segment_bytes": 10 * MIB}, "^large_segment_bytes is 10485760, and requests of up to 10485760 [(]10 MiB[)] share such a segment: make it larger[.]$"),
        ({"memory_fraction": 0.0}, "^memory_fraction is 0.0, and it is a share of the device's memory: give a number above 0 and at most 1[.]$"),
        ({"memory_fraction": 1.5}, "^memory_fraction is 1.5, and it is a share"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllocatorConfig(**fields)
